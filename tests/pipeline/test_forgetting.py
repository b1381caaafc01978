"""A user is exported and forgotten: no content of theirs is left in store, archive or mirror."""

import html
import re
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

import storage
from storage.codec import Reference
from storage.errors import InputError
from storage.ids import UserId
from storage.maintenance.censor import RemovedContent, remove_content
from storage.maintenance.cold_archive import sweep
from storage.maintenance.user_export import UserExport, export_user
from storage.pipeline import mirror
from storage.testing import RoomBuilder
from tests.maintenance.archived import (
    GRACE_S,
    PATIENT,
    archive,
    raw_bytes,
    references,
    wait_for_snapshots,
)
from tests.maintenance.rooms import SERVER, findings
from tests.pipeline.mirrored import differences

ALICE, BOB = UserId(f"@alice:{SERVER}"), UserId(f"@bob:{SERVER}")
SECRET = "zebra-crossing"


def talk() -> RoomBuilder:
    """Alice and Bob talk; Bob has a display name, sets the topic, and says SECRET."""
    room = RoomBuilder("11", servers=(SERVER,), seed=3)
    room.create(ALICE)
    room.join(ALICE)
    room.power_levels(ALICE, {"state_default": 0}, users={ALICE: 100})
    room.join_rules(ALICE, "public")
    room.send(ALICE, "m.room.member", _member("invite"), state_key=BOB)
    room.send(BOB, "m.room.member", _member("join"), state_key=BOB)
    for number in range(30):
        room.message((ALICE, BOB)[number % 2], f"{number} {SECRET if number % 2 else '<b>tea</b>'}")
    room.topic(BOB, SECRET)
    return room


def _member(membership: str) -> dict[str, str]:
    return {"membership": membership, "displayname": SECRET}


def files_with(folder: Path, text: str) -> list[str]:
    """The files below a folder that have a text, also in columns of Parquet."""
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        raw = path.read_bytes()
        if path.suffix == ".parquet":
            raw += str(pq.read_table(path, partitioning=None).to_pylist()).encode()
        if text.encode() in raw:
            found.append(path.name)
    return found


async def test_a_forgotten_user_leaves_nothing(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_snapshots(monkeypatch, PATIENT)
    room = talk()
    (tmp_path / "packs").mkdir()
    lake, packs, told = tmp_path / "lake", tmp_path / "packs", tmp_path / "bob"
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus[:20], room_version="11")
        mirror(None, dsn, str(lake), once=True)
        await store.append(room.pdus[20:], room_version="11")
        await store.account_data.set(BOB, "org.test.note", {"note": SECRET})
        await archive(store, str(packs))
        mirror(None, dsn, str(lake), once=True)
        assert files_with(lake, SECRET)

        done = await export_user(store.database, BOB, told, server_name=SERVER)
        assert done == UserExport(rooms=1, seen=len(room.pdus), sent=17, account=1)
        of_bob = [orjson.loads(raw) for raw in room.pdus if orjson.loads(raw)["sender"] == BOB]
        lines = [orjson.loads(line) for line in (told / "sent.ndjson").read_bytes().splitlines()]
        assert [line["pdu"] for line in lines] == of_bob
        assert files_with(told, SECRET) == [
            "account.ndjson",
            "1.html",
            "seen.ndjson",
            "sent.ndjson",
        ]
        page = (told / "rooms" / "1.html").read_text("utf-8")
        assert "<b>tea" not in page
        assert html.escape("<b>tea</b>") in page
        assert len(re.findall('<tr class="own">', page)) == 17
        with pytest.raises(InputError, match="exists"):
            await export_user(store.database, BOB, told, server_name=SERVER)

        records = await references(store)
        removed = await remove_content(store.database, BOB)
        assert removed == RemovedContent(removed=18, left=0, account_data=1, to_device=0)
        await sweep(store.database, grace_s=GRACE_S)
        mirror(None, dsn, str(lake), once=True, keep_hours=0)

        assert [
            one for one, raw in (await raw_bytes(store)).items() if SECRET.encode() in raw
        ] == []
        assert files_with(lake, SECRET) == []
        assert not any(any(_record(packs, one)) for one in _of_bob(records, lines))
        assert any(_record(packs, one) for one in records.values())
        assert await differences(dsn, lake, await raw_bytes(store)) == {}
        assert await findings(store) == []
        event = await store.event(lines[1]["event_id"])
        assert event is not None
        assert event.content == {}
        again = await remove_content(store.database, BOB)
        assert again == RemovedContent()


async def test_what_came_with_an_invite_is_removed(dsn: str) -> None:
    """Bob of another server invites Alice; his membership comes along as stripped state."""
    bob, name = UserId('@b"ö\\b:s2.test'), UserId("@carol:s2.test")
    room = RoomBuilder("11", servers=("s2.test",), seed=5)
    room.start(bob)
    invite = room.invite(bob, ALICE)
    shown = [
        {"type": "m.room.member", "state_key": bob, "sender": bob, "content": _member("join")},
        {"type": "m.room.topic", "state_key": "", "sender": bob, "content": {"topic": SECRET}},
        {"type": "m.room.name", "state_key": "", "sender": name, "content": {"name": "kept"}},
    ]
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(
            [invite.pdu],
            room_version="11",
            origin="out_of_band",
            stripped_state={invite.event_id: shown},
        )
        removed = await remove_content(store.database, bob)
        assert removed == RemovedContent(removed=1, stripped_states=1)
        stripped = (await store.sync(ALICE)).invite[room.room_id].invite_state
        assert [one["content"] for one in stripped] == [
            {"membership": "join"},
            {},
            {"name": "kept"},
            {"membership": "invite"},
        ]
        assert await remove_content(store.database, bob) == RemovedContent()


def _of_bob(records: dict[str, Reference], lines: list[dict[str, str]]) -> list[Reference]:
    found = [records[line["event_id"]] for line in lines if line["event_id"] in records]
    assert len(found) > 10
    return found


def _record(packs: Path, reference: Reference) -> bytes:
    """The bytes of a record in its pack; none in a pack that is gone."""
    files = packs.rglob("pack-*")
    found = [one for one in files if int(re.findall(r"[0-9]+", one.name)[0]) == reference.pack]
    start = reference.offset
    return found[0].read_bytes()[start : start + reference.length] if found else b""
