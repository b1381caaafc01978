"""room-storage explain: plans of a hot query on a database, as text and as JSON.

It names each index that is missing.
"""

import asyncio
import json

import pytest

import storage
from storage.cli.app import main
from storage.store.catalogue import QUESTIONS
from storage.testing import RoomBuilder
from tests.cli.running import room_storage
from tests.queries.rooms import ADMIN, LOCAL, REMOTE, deliver, new_room

SERVER = "s1.test"


@pytest.fixture
async def filled(dsn: str) -> RoomBuilder:
    room = new_room(members=[LOCAL])
    room.message(ADMIN)
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, room)
    return room


async def test_a_plan_for_people(filled: RoomBuilder, dsn: str) -> None:
    done = room_storage(
        "explain",
        "messages",
        "--room",
        filled.room_id,
        "--user",
        LOCAL,
        "--limit",
        "5",
        STORAGE_DSN=dsn,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "statement 1 of 1" in done.stdout
    assert "ms running" in done.stdout
    assert "rows looked at:" in done.stdout
    assert "Scan" in done.stdout


async def test_plans_for_programs(filled: RoomBuilder, dsn: str) -> None:
    for more in ((), ("--generic",)):
        done = room_storage(
            "explain", "sync", "--json", "--user", LOCAL, "--behind", "2", "--dsn", dsn, *more
        )
        plans = json.loads(done.stdout)
        assert 2 <= len(plans) <= 4
        for plan in plans:
            assert plan.keys() == {
                "sql",
                "planning_ms",
                "execution_ms",
                "rows",
                "rows_looked_at",
                "pages",
                "plan",
            }
            assert plan["plan"]["Actual Loops"] == 1
        assert any(plan["rows_looked_at"].get("events") for plan in plans)


async def test_every_question_can_be_asked(
    filled: RoomBuilder, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        "room": filled.room_id,
        "user": LOCAL,
        "event": filled.events[-1].event_id,
        "server": "s2.test",
        "timestamp": "1700000000000",
    }
    for name, question in QUESTIONS.items():
        given = [
            word for need in question.needs if need in names for word in (f"--{need}", names[need])
        ]
        assert (
            name,
            await asyncio.to_thread(main, ["explain", name, "--json", *given, "--dsn", dsn]),
        ) == (name, 0)
        assert json.loads(capsys.readouterr().out)


async def test_what_is_wrong_is_said(
    filled: RoomBuilder, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, told in (
        (["nonsense"], "no query is named 'nonsense'"),
        (["messages", "--room", filled.room_id], "messages needs user"),
        (["messages", "--room", "!nowhere:s1.test", "--user", LOCAL], "!nowhere:s1.test"),
        (
            ["messages", "--room", filled.room_id, "--user", REMOTE],
            f"{REMOTE!r}: not a user of {SERVER}",
        ),
        (["event", "--event", "no id"], "an event id begins with $"),
        (["rooms-of", "--user", LOCAL, "--since", "s1"], "takes no --since"),
        (["sync", "--user", LOCAL, "--since", "damaged"], "damaged"),
    ):
        assert await asyncio.to_thread(main, ["explain", *arguments, "--dsn", dsn]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert told in printed.err


def test_help_lists_the_questions() -> None:
    done = room_storage("explain", "--help")
    assert done.returncode == 0
    assert [name for name in QUESTIONS if name not in done.stdout] == []


async def test_nothing_is_changed(filled: RoomBuilder, dsn: str) -> None:
    done = room_storage("explain", "initial-sync", "--json", "--user", LOCAL, STORAGE_DSN=dsn)
    assert done.returncode == 0
    async with storage.open(dsn, server_name=SERVER) as store:
        assert set((await store.sync(LOCAL)).join) == {filled.room_id}
