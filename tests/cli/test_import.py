"""Import: any order, any spelling, bad lines, broken imports, the state after an interrupt."""

import asyncio
import base64
import io
import json
import os
import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

import storage
from storage.errors import DatabaseUnavailable, InputError
from storage.event import Event, content_hash, event_id
from storage.importing import Import, Rejects
from storage.pipeline.imports.lines import parse_line
from storage.pipeline.imports.validate import LineValidator
from storage.testing import (
    ODD_SOME,
    SHAPES,
    GeneratedEvent,
    RoomBuilder,
    build_room,
    deliver_shuffled,
    deliver_with_gap,
    generate_room,
    ndjson_line,
    respell,
    write_ndjson,
)
from tests.maintenance.rooms import findings

ALICE = "@alice:s1.test"


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[storage.Store]:
    async with storage.open(dsn, server_name="s1.test") as opened:
        yield opened


def written(path: Path, events: Iterable[GeneratedEvent]) -> str:
    write_ndjson(events, path)
    return str(path)


async def imported(
    store: storage.Store, *sources: str, **how: int
) -> tuple[dict[str, int], list[dict[str, object]]]:
    """The outcomes, and the rejects."""
    target = io.BytesIO()
    rejects = Rejects(target)
    summary = await Import(store, rejects, **how).run(sources)  # type: ignore[arg-type]
    told = [json.loads(line) for line in target.getvalue().splitlines()]
    assert len(told) == rejects.count
    assert sum(summary.outcomes.values()) == summary.lines
    return dict(summary.outcomes), told


async def ids_in(store: storage.Store) -> set[str]:
    async with store.database.connection() as conn:
        return set(await conn.fetchvals("SELECT event_id FROM events"))


async def tables(store: storage.Store) -> list[object]:
    """What an import leaves, without numbers and times."""
    async with store.database.connection() as conn:
        return [
            await conn.fetchvals(
                "SELECT format('%s %s %s %s %s %s', event_id, json, rejected, soft_failed, "
                "outlier, topological_ordering) FROM events ORDER BY 1"
            ),
            await conn.fetchvals(
                """
                SELECT format('%s %s %s %s', r.room_id, t.type, k.state_key, e.event_id)
                FROM current_state c JOIN rooms r USING (room_nid)
                    JOIN state_keys k USING (state_key_nid) JOIN event_types t USING (type_nid)
                JOIN events e ON e.event_nid = c.event_nid ORDER BY 1
                """
            ),
        ]


# --------------------------------------------------------------------------------------------------
# what gets in


async def test_bytes_survive_every_spelling(store: storage.Store, tmp_path: Path) -> None:
    rng = random.Random(5)
    events = [respell(event, rng) for event in generate_room(SHAPES["small_chat"], 120, seed=11)]
    outcomes, rejects = await imported(store, written(tmp_path / "room.ndjson", events))
    assert (set(outcomes), rejects) == ({"stored"}, [])
    held = await store.events([event.event_id for event in events])
    assert {event_id: stored.raw for event_id, stored in held.items()} == {
        event.event_id: event.pdu for event in events
    }


STRAY: tuple[dict[str, Any], ...] = (
    {"age_ts": 1_400_000_000_000},
    {"outlier": True},
    {"destinations": ["s1.test"]},
    {"age_ts": 7, "outlier": False, "destinations": []},
)


@pytest.mark.parametrize("version", ["1", "5", "6", "12"])
@pytest.mark.parametrize("form", ["bare", "in an envelope", "by a task of Spark"])
async def test_stray_keys_of_old_servers_leave_the_content(
    store: storage.Store, tmp_path: Path, version: str, form: str
) -> None:
    """Their content hash leaves the keys out. One that has them, by the text, keeps them."""
    room = RoomBuilder(version, sign=False)
    room.start(ALICE)
    made = [room.message(ALICE, f"message {number}") for number in range(len(STRAY))]
    pdus = [dict(one.json) for one in room.events]
    for at, stray in enumerate(STRAY, len(pdus) - len(STRAY)):
        pdus[at] |= stray
    whole, wrong = {**pdus[-1], "depth": 40}, {**pdus[-1], "depth": 41}
    if version == "1":
        whole["event_id"], wrong["event_id"] = "$whole:s1.test", "$wrong:s1.test"
    whole["hashes"] = {"sha256": content_hash(whole)}
    pdus += [whole, wrong]
    lines = [
        json.dumps(pdu if form == "bare" else {"pdu": pdu, "room_version": version}) for pdu in pdus
    ]
    if form == "by a task of Spark":
        validator = LineValidator({room.room_id: version}, version)
        found = [validator.parsed(parse_line(line.encode())) for line in lines]
        assert all(isinstance(one, Event) for one in found)
        valid = [isinstance(one, Event) and one.content_hash_valid for one in found]
        assert valid == [True] * (len(pdus) - 1) + [False]
        return
    path = tmp_path / "room.ndjson"
    path.write_text("\n".join(lines))
    summary = await Import(store, Rejects(None)).run([str(path)])
    assert summary.stray_keys == len(STRAY)
    assert dict(summary.outcomes) == {"stored": len(pdus) - 1, "redacted": 1}
    stored = await store.events([one.event_id for one in made])
    assert [stored[one.event_id].json for one in made] == [one.json for one in made]
    kept = await store.event(event_id(whole, version))
    assert kept is not None
    assert (kept.json["age_ts"], kept.content) == (7, made[-1].json["content"])
    assert await findings(store) == []


async def test_live_events_with_stray_keys_stay_by_the_text(store: storage.Store) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(ALICE)
    said = room.message(ALICE, "hello")
    pdus = [dict(one.json) for one in room.events]
    pdus[-1]["age_ts"] = 5
    results = await store.append(pdus, room_version="11")
    assert (results[-1].event_id, results[-1].outcome) == (said.event_id, "redacted")


@pytest.mark.parametrize("version", ["1", "6", "11", "12"])
@pytest.mark.parametrize("batch_max", [1, 7, 1000])
async def test_a_shuffled_room_of_bare_pdus_comes_in_whole(
    store: storage.Store, tmp_path: Path, version: str, batch_max: int
) -> None:
    room = deliver_shuffled(
        build_room(SHAPES["small_chat"], 100, seed=3, version=version), seed=batch_max
    )
    path = tmp_path / "room.ndjson"
    path.write_bytes(b"\n".join(room.pdus))
    outcomes, rejects = await imported(store, str(path), batch_max=batch_max, retries_max=16)
    assert rejects == []
    assert sum(outcomes.values()) == len(room)
    assert await ids_in(store) == {event.event_id for event in room}
    assert len(await store.forward_extremities(room.room_id)) >= 1


async def test_rooms_keep_their_order_side_by_side(store: storage.Store, tmp_path: Path) -> None:
    rooms = [
        generate_room(
            SHAPES["small_chat"].replaced(odd=ODD_SOME), 150, seed=seed, version=str(seed)
        )
        for seed in range(3, 13)
    ]
    mixed = [event for row in zip(*rooms, strict=True) for event in row]
    outcomes, rejects = await imported(
        store, written(tmp_path / "rooms.ndjson", mixed), batch_max=20
    )
    expected = {event.event_id for room in rooms for event in room if event.expected == "invalid"}
    assert outcomes["rejected"] == sum(event.expected == "rejected" for event in mixed)
    assert {
        str(reject["event_id"])
        for reject in rejects
        if reject["outcome"] == "invalid" and reject["event_id"]
    } <= expected
    alone = [event for room in rooms for event in room]
    outcomes, again = await imported(store, written(tmp_path / "again.ndjson", alone))
    assert outcomes == {"duplicate": len(mixed) - len(rejects), "invalid": len(rejects)}
    assert sorted(str(reject["text"]) for reject in again) == sorted(
        str(reject["text"]) for reject in rejects
    )


async def test_a_gap_comes_with_the_state_before_it_and_is_filled(
    store: storage.Store, tmp_path: Path
) -> None:
    builder = build_room(SHAPES["small_chat"], 80, seed=4)
    room = deliver_with_gap(builder, 30, 50)
    assert {event.origin for event in room} == {"live", "outlier", "backfill"}
    outcomes, rejects = await imported(store, written(tmp_path / "room.ndjson", room))
    assert rejects == []
    assert set(outcomes) <= {"stored", "duplicate"}
    assert await ids_in(store) == {event.event_id for event in room}
    assert await store.backward_extremities(room.room_id) == set()
    last = builder.events[-1]
    assert await store.state_before(last.event_id) == dict(last.state_before)


async def test_what_builds_on_a_later_file_waits_for_it(
    store: storage.Store, tmp_path: Path
) -> None:
    events = list(generate_room(SHAPES["small_chat"], 60, seed=8))
    late, early = (
        written(tmp_path / "1.ndjson", events[20:]),
        written(tmp_path / "2.ndjson", events[:20]),
    )
    outcomes, rejects = await imported(store, late, early, retries_max=7)
    assert (outcomes, rejects) == ({"stored": 60}, [])


# --------------------------------------------------------------------------------------------------
# what does not


async def test_bad_lines_are_told_and_do_not_stop_it(store: storage.Store, tmp_path: Path) -> None:
    events = list(generate_room(SHAPES["small_chat"], 20, seed=9))
    lines = [ndjson_line(event).rstrip() for event in events]
    bad = [
        b"{",
        b'{"pdu":7}',
        b'{"type":"\xff"}',
        b'{"pdu":{"type":1,"room_id":"!x:y"},"room_version":"11"}',
        b"[]",
        b'{"state_before":[],"pdu":{}}',
    ]
    mixed = tmp_path / "mixed.ndjson"
    mixed.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([lines[0], *bad, b"", b"  ", *lines[1:]]))
    outcomes, rejects = await imported(store, str(mixed))
    assert outcomes == {"stored": 20, "bad_line": 5, "invalid": 1}
    assert {reject["line"]: reject["outcome"] for reject in rejects} == dict.fromkeys(
        [2, 3, 4, 6, 7], "bad_line"
    ) | {5: "invalid"}
    assert all(reject["file"] == str(mixed) and reject["reason"] for reject in rejects)
    kept = {
        reject["line"]: reject.get("text") or base64.b64decode(str(reject["base64"]))
        for reject in rejects
    }
    assert kept[2] == "{"
    assert kept[4] == bad[2]


async def test_an_endless_line_is_one_bad_line(
    store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.importing.reading.CHUNK_BYTES", 1000)
    events = list(generate_room(SHAPES["small_chat"], 8, seed=9))
    path = tmp_path / "long.ndjson"
    write_ndjson(events, path)
    path.write_bytes(b'{"x":"' + b"y" * (17 << 20) + b'"}\n' + path.read_bytes() + b'{"no end')
    outcomes, rejects = await imported(store, str(path))
    assert outcomes == {"stored": 8, "bad_line": 2}
    assert [(reject["line"], str(reject["reason"])[:11]) for reject in rejects] == [
        (1, "longer than"),
        (10, "not JSON: U"),
    ]
    assert len(str(rejects[0]["text"])) == 1 << 20


async def test_what_never_finds_its_parents_is_reported_at_the_end(
    store: storage.Store, tmp_path: Path
) -> None:
    events = list(generate_room(SHAPES["small_chat"], 40, seed=12))
    lost = events.pop(25)
    below = {event.event_id for event in events[25:]}
    outcomes, rejects = await imported(
        store, written(tmp_path / "room.ndjson", events), retries_max=3
    )
    assert outcomes["missing_parents"] == len(rejects) > 0
    assert {str(reject["event_id"]) for reject in rejects} <= below
    assert [lost.event_id] in [reject["missing"] for reject in rejects]
    again = tmp_path / "again.ndjson"
    again.write_bytes(b"\n".join([lost.pdu, *(str(reject["text"]).encode() for reject in rejects)]))
    assert await imported(store, str(again)) == ({"stored": 1 + len(rejects)}, [])


async def test_a_room_that_nobody_knows_is_reported(store: storage.Store, tmp_path: Path) -> None:
    room = generate_room(SHAPES["small_chat"], 10, seed=13)
    path = tmp_path / "room.ndjson"
    path.write_bytes(b"\n".join(room.pdus[1:]))
    outcomes, rejects = await imported(store, str(path))
    assert outcomes == {"invalid": 9}
    assert all("room is not known" in str(reject["reason"]) for reject in rejects)


async def test_a_file_that_cannot_be_read_ends_it(store: storage.Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Is a directory"):
        await imported(store, str(tmp_path))


# --------------------------------------------------------------------------------------------------
# interruptions


class Interrupting:
    """An observer that acts at the n-th write.

    An error stays for every statement until `back` is called.
    """

    def __init__(self, at: int, what: "asyncio.Event | Exception") -> None:
        self.left = at
        self.what = what

    def before(self, statement: str) -> None:
        self.left -= "INSERT INTO events" in statement
        if self.left <= 0 and isinstance(self.what, Exception):
            raise self.what

    def back(self) -> None:
        """The database is there again."""
        self.what = asyncio.Event()

    # The observer's interface sets the arguments.
    def after(self, statement: str, seconds: float) -> None:  # noqa: ARG002
        if (
            "INSERT INTO events" in statement
            and self.left <= 0
            and isinstance(self.what, asyncio.Event)
        ):
            self.what.set()


async def either(signal: asyncio.Event, importing: "asyncio.Future[Any]") -> None:
    """Wait for the signal; an import that ends before it has failed, and says how."""
    signalled = asyncio.ensure_future(signal.wait())
    await asyncio.wait({signalled, importing}, return_when=asyncio.FIRST_COMPLETED)
    if importing.done():
        signalled.cancel()
        await importing
        pytest.fail("the import ended before the signal")


async def test_an_interrupt_leaves_what_is_committed_and_a_rerun_goes_on(
    dsn: str, empty_dsn: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "room.ndjson", generate_room(SHAPES["fork_heavy"], 300, seed=2))
    reached = asyncio.Event()
    async with storage.open(dsn, server_name="s1.test", observer=Interrupting(3, reached)) as store:
        importing = asyncio.ensure_future(imported(store, path, batch_max=20))
        await either(reached, importing)
        importing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await importing
    async with storage.open(dsn, server_name="s1.test") as store:
        before = len(await ids_in(store))
        assert 60 <= before < 300
        outcomes, rejects = await imported(store, path, batch_max=20)
        assert rejects == []
        assert outcomes["duplicate"] == before
        interrupted = await tables(store)
    async with storage.open(empty_dsn, server_name="s1.test", migrate=True) as store:
        await imported(store, path)
        assert await tables(store) == interrupted


async def test_a_lost_database_ends_it_with_its_own_error(dsn: str, tmp_path: Path) -> None:
    path = written(tmp_path / "room.ndjson", generate_room(SHAPES["small_chat"], 100, seed=2))
    observer = Interrupting(3, DatabaseUnavailable("gone"))
    async with storage.open(dsn, server_name="s1.test", observer=observer) as store:
        with pytest.raises(DatabaseUnavailable, match="gone"):
            await imported(store, path, batch_max=20)
        observer.back()
        assert len(await ids_in(store)) == 40
        assert (await imported(store, path))[0] == {"duplicate": 40, "stored": 60}


async def test_a_pipe_is_stored_while_it_is_silent(dsn: str, tmp_path: Path) -> None:
    room = RoomBuilder("11")
    room.start(room.user(1))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    stored = asyncio.Event()
    async with storage.open(dsn, server_name="s1.test", observer=Interrupting(1, stored)) as store:
        importing = asyncio.ensure_future(imported(store, str(pipe)))
        with await asyncio.to_thread(pipe.open, "wb", 0) as end:
            end.write(b"\n".join(room.pdus) + b"\n")
            await either(stored, importing)
            importing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await importing
        assert await ids_in(store) == {event.event_id for event in room.events}


async def test_a_state_with_two_events_of_one_key_is_one_reject(
    store: storage.Store, tmp_path: Path
) -> None:
    """The other lines of its batch are stored."""
    room = RoomBuilder("11", seed=1)
    room.start(room.user(1))
    old = room.topic(room.user(1), "one")
    room.topic(room.user(1), "two")
    before = room.pdus
    room.message(room.user(1), "missing")
    after = room.message(room.user(1), "after")
    other = RoomBuilder("11", seed=2)
    other.start(other.user(1))
    state = [*room.state.values(), old.event_id]
    line = {"pdu": json.loads(after.pdu), "room_version": "11", "state_before": state}
    path = tmp_path / "room.ndjson"
    path.write_bytes(b"\n".join([*before, json.dumps(line).encode(), *other.pdus]) + b"\n")
    outcomes, [reject] = await imported(store, str(path))
    assert outcomes == {"stored": len(before) + len(other.pdus), "invalid": 1}
    assert "two events of" in str(reject["reason"])
    assert reject["event_id"] == after.event_id


async def test_what_came_out_of_band_is_imported_with_its_stripped_state(
    store: storage.Store, tmp_path: Path
) -> None:
    room = RoomBuilder("11", servers=("s2.test",), seed=1)
    room.start(room.user(1), join_rule="invite")
    invite = room.invite(room.user(1), "@alice:s1.test")
    name = {
        "type": "m.room.name",
        "state_key": "",
        "sender": room.user(1),
        "content": {"name": "there"},
    }
    line = {
        "pdu": json.loads(invite.pdu),
        "room_version": "11",
        "origin": "out_of_band",
        "stripped_state": [name],
    }
    path = tmp_path / "room.ndjson"
    path.write_text(json.dumps(line) + "\n")
    assert await imported(store, str(path)) == ({"stored": 1}, [])
    [shown] = (await store.sync("@alice:s1.test")).invite.values()
    assert shown.invite_state[0] == name
    line["origin"] = "outlier"
    path.write_text(json.dumps(line) + "\n")
    outcomes, [reject] = await imported(store, str(path))
    assert (outcomes, "stripped_state goes with" in str(reject["reason"])) == ({"invalid": 1}, True)
