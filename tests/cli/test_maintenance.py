"""verify, gc, rebuild-visibility and explain-visibility as processes: exit codes, JSON, text."""

import dataclasses
import json
import re
import shlex

import pytest

import storage
from storage.cli.censor import _print_censored
from storage.database import Database
from storage.maintenance.censor import Censored
from storage.testing import RoomBuilder, build_room
from tests.cli.running import ROOT, room_storage
from tests.maintenance.older_release import append_before
from tests.maintenance.rooms import LIVELY, SERVER
from tests.postgres import others_ended


async def filled(dsn: str) -> RoomBuilder:
    room = build_room(LIVELY, 120, seed=4, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        for event in room.events:
            await store.append([event.pdu])
        await others_ended(store.database)
    return room


async def damage(dsn: str, sql: str) -> None:
    async with await Database.open(dsn) as database, database.connection() as conn:
        await conn.execute(sql)


async def test_verify_finds_and_repairs(dsn: str) -> None:
    room = await filled(dsn)
    done = room_storage("verify", STORAGE_DSN=dsn)
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing found\n", "")
    await damage(
        dsn,
        "UPDATE visibility SET joined_count = joined_count + 1;"
        " UPDATE auth_chains SET link_1 = NULL",
    )
    done = room_storage("verify", "--json", "--dsn", dsn)
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert {finding["check"] for finding in found["findings"]} == {
        "visibility_counts",
        "auth_chains",
    }
    assert found["left"] == len(found["findings"])
    assert (
        room_storage("verify", "--json", "--dsn", dsn, "--room", "!nowhere:s1.test").returncode == 2
    )
    done = room_storage("verify", "--repair", "--dsn", dsn, "--room", room.room_id)
    assert done.returncode == 0
    assert f"{found['left']} findings, {found['left']} of them repaired" in done.stdout
    assert room_storage("verify", "--dsn", dsn).returncode == 0


async def test_what_cannot_be_repaired_is_left(dsn: str) -> None:
    await filled(dsn)
    await damage(
        dsn,
        "UPDATE events SET json = set_byte(json, 20, get_byte(json, 20) # 4) WHERE event_nid = 20; "
        "DELETE FROM memberships",
    )
    done = room_storage("verify", "--repair", "--json", "--server-name", SERVER, STORAGE_DSN=dsn)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [
        (finding["check"], finding["repaired"], finding["remedy"])
        for finding in found["findings"]
        if not finding["repaired"]
    ] == [("bytes", False, "restore a backup")]
    assert found["left"] == 1
    done = room_storage("verify", "--server-name", SERVER, STORAGE_DSN=dsn)
    assert done.stdout.endswith("to repair: restore a backup\n")


async def test_the_command_that_repairs_is_named(dsn: str) -> None:
    room = await filled(dsn)
    await damage(dsn, "UPDATE events SET depth = -1 WHERE event_nid = 20")
    done = room_storage("verify", "--server-name", SERVER, STORAGE_DSN=dsn)
    repair = f"room-storage verify --repair --room '{room.room_id}'"
    assert done.stdout.endswith(f"to repair: {repair}\n")
    _, *arguments = shlex.split(repair)
    done = room_storage(*arguments, "--server-name", SERVER, STORAGE_DSN=dsn)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1 finding, 1 of them repaired")


async def test_verify_finds_and_authorises_again(dsn: str) -> None:
    """An earlier release rejected all of a room but its create event.

    The batch began with a room of another version.
    """
    first, room = RoomBuilder("11", seed=1, sign=False), RoomBuilder("12", seed=2, sign=False)
    for one in (first, room):
        one.start(one.user(1))
        one.message(one.user(1), "hello")
    await append_before(dsn, [*first.pdus, *room.pdus])
    done = room_storage("verify", "--json", "--dsn", dsn)
    found = json.loads(done.stdout)["findings"]
    assert done.returncode == 1
    assert {(finding["check"], finding["room_id"]) for finding in found} == {
        ("rejected", room.room_id)
    }
    assert "accepted" in {finding["expected"] for finding in found}
    assert all(finding["repairable"] for finding in found)
    done = room_storage("verify", "--repair", "--json", "--dsn", dsn)
    document = json.loads(done.stdout)
    assert (done.returncode, document["left"]) == (0, 0)
    assert all(finding["repaired"] for finding in document["findings"])
    assert room_storage("verify", "--dsn", dsn).stdout == "nothing found\n"
    async with storage.open(dsn, server_name=SERVER) as store:
        assert await store.current_state(room.room_id) == dict(room.state)


async def test_gc_rebuild_and_explain(dsn: str) -> None:
    room = await filled(dsn)
    done = room_storage("gc", "--json", "--dsn", dsn)
    assert done.returncode == 0
    assert json.loads(done.stdout)["state_groups"] > 0
    said = room_storage("gc", "--dsn", dsn).stdout
    assert said == (
        "0 state groups freed\n0 old transaction ids deleted\n0 unused connections deleted\n"
    )
    await damage(
        dsn,
        "DELETE FROM visibility WHERE principal_nid <> (SELECT min(principal_nid) "
        "FROM principals WHERE name LIKE '@%:s1.test')",
    )
    assert room_storage("rebuild-visibility", room.room_id, "--dsn", dsn).returncode == 0
    assert room_storage("verify", "--dsn", dsn).returncode == 0
    done = room_storage(
        "explain-visibility", room.events[0].event_id, room.events[0].sender, "--dsn", dsn
    )
    assert done.returncode == 0
    assert done.stdout.startswith(f"{room.events[0].sender} may see {room.events[0].event_id}: ")
    done = room_storage(
        "explain-visibility", room.events[0].event_id, "s9.test", "--json", "--dsn", dsn
    )
    assert json.loads(done.stdout)["visible"] is False
    for event_id, whom in (
        ("$nothing", "s9.test"),
        (room.events[0].event_id, "@user:s9.test"),
        (room.events[0].event_id, "@user"),
    ):
        done = room_storage("explain-visibility", event_id, whom, "--dsn", dsn)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr


def test_an_empty_database(dsn: str) -> None:
    for command in ("verify", "gc"):
        assert room_storage(command, "--dsn", dsn).returncode == 0


async def test_censor(dsn: str) -> None:
    """A time in days, a dry run, and what is left to wait."""
    room = await filled(dsn)
    redacted = sum(event.type == "m.room.redaction" for event in room.events)
    assert redacted > 0
    assert room_storage("censor", "--dsn", dsn).stdout.startswith("0 events censored\n")
    done = room_storage("censor", "--older-than", "0", "--dry-run", "--json", "--dsn", dsn)
    counted = json.loads(done.stdout)
    assert (done.returncode, counted["dry_run"], counted["waiting"]) == (0, True, 0)
    assert counted["censored"] > 0
    done = room_storage("censor", "--older-than", "0", STORAGE_DSN=dsn)
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0,
        f"{counted['censored']} events censored",
    )
    for wrong in ("nan", "inf", "1e300", "-1"):
        assert room_storage("censor", "--older-than", wrong, "--dsn", dsn).returncode == 2
    off = room_storage("censor", "--dsn", dsn, STORAGE_CENSOR_AFTER_MS="-1")
    assert (off.returncode, "give the age of a redaction: --older-than" in off.stderr) == (2, True)
    assert (
        json.loads(room_storage("censor", "--older-than", "0", "--json", "--dsn", dsn).stdout)[
            "censored"
        ]
        == 0
    )
    assert room_storage("verify", "--dsn", dsn).returncode == 0
    done = room_storage("censor", "--dsn", dsn, STORAGE_CENSOR_AFTER_MS="-1")
    assert (done.returncode, "switched off" in done.stderr) == (2, True)


async def test_forget_user(dsn: str) -> None:
    await filled(dsn)
    user = f"@user1:{SERVER}"
    assert room_storage("forget-user", user, "--dsn", dsn).stdout == f"{user} is forgotten\n"
    assert (
        room_storage("forget-user", user, STORAGE_DSN=dsn).stdout
        == f"{user} is forgotten, and was so before\n"
    )
    async with await Database.open(dsn) as database, database.connection() as conn:
        erased = (
            "SELECT array_agg(p.name) FROM erased_users u JOIN principals p USING (principal_nid)"
        )
        assert await conn.fetchval(erased) == [user]
        assert json.loads(
            room_storage("forget-user", "--undo", user, "--json", "--dsn", dsn).stdout
        ) == {
            "user": user,
            "erased": False,
            "changed": True,
            "known": True,
        }
        assert await conn.fetchval(erased) is None
    assert (
        room_storage("forget-user", "--undo", user, "--dsn", dsn).stdout
        == f"{user} is not forgotten, and was so before\n"
    )
    nobody = f"@usr1:{SERVER}"
    assert room_storage("forget-user", nobody, "--dsn", dsn).stdout == (
        f"{nobody} is forgotten\nno stored event names this user: check the id\n"
    )
    assert room_storage("forget-user", "user1", "--dsn", dsn).returncode == 2
    both = room_storage("forget-user", "--undo", "--remove", user, "--dsn", dsn)
    assert (both.returncode, both.stderr) == (
        2,
        "error: --undo cannot restore what --remove has removed: give one of them\n",
    )


@pytest.mark.parametrize(
    "done,printed",
    [
        (Censored(), ["0 events censored"]),
        (
            Censored(1, 2, 3, 4_000),
            [
                "1 event censored",
                "2 left: the redacted content is still needed to authorise other events",
                "3 busy: locked by a writer, run it again",
                "4,000 waiting: not due yet",
            ],
        ),
    ],
    ids=["nothing", "each kind"],
)
def test_counts_of_censor_are_named_as_in_its_json_and_on_its_page(
    done: Censored, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _print_censored(done, dry_run=False)
    assert capsys.readouterr().out.splitlines() == printed
    page = (ROOT / "docs/how-to/censor.md").read_text("utf-8")
    table = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert table == [field.name for field in dataclasses.fields(Censored)]


def test_gc_of_an_unknown_room(dsn: str) -> None:
    done = room_storage("gc", "--room", "!nowhere:s1.test", "--dsn", dsn)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown room !nowhere:s1.test\n"
