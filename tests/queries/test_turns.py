"""Large requests let other tasks run: how much is done between two turns of the event loop."""

import asyncio
import gc
from typing import Any

import orjson
import pytest

from storage import EventId, RoomId, Store, arguments, responses
from storage.database.placeholders import long_lists_as_text
from storage.errors import InputError, InvalidIdentifier
from storage.event import reading
from storage.federation import Receiver, Responder
from storage.persist import receive
from storage.persist.commit.retry import EVENTS_PER_LOAD
from storage.persist.load import prefetch
from storage.persist.load.prefetch import SQL_LOAD_BATCH
from storage.queries import client_page, events, room_info
from storage.queries.events import VALUES_MAX
from storage.queries.sync import response as sync_response
from storage.testing import RoomBuilder
from storage.turns import (
    ITEM_BYTES,
    TURN_BYTES,
    TURN_ROWS,
    mapped,
    pause_if_long,
)
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, deliver, new_room
from tests.turns import LoopTurns

LISTS = 20_000
ITEMS = TURN_BYTES // ITEM_BYTES + 1


def of_lists(number: int) -> RoomBuilder:
    """A room with messages of 20,000 empty lists each, which are 60,000 bytes."""
    room = new_room(members=[LOCAL])
    for _ in range(number):
        room.send(ADMIN, "m.room.message", {"body": "lists", "a": [[]] * LISTS})
    return room


async def test_a_batch_is_parsed_in_turns(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    room = new_room(members=[f"@u{number}:s2.test" for number in range(500)])
    async with LoopTurns() as turns:
        turns.watch(monkeypatch, receive, "parse")
        turns.watch(monkeypatch, receive, "peek")
        await deliver(store, room)
    assert turns.total >= 1_000
    assert turns.most <= 2 * ITEMS


async def test_long_events_are_parsed_one_by_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = of_lists(10)
    async with LoopTurns() as turns:
        turns.watch(monkeypatch, receive, "parse", lambda raw, *_: len(raw))
        await deliver(store, room)
    assert turns.total > 10 * 3 * LISTS
    assert turns.most <= 2 * TURN_BYTES


async def test_create_events_are_read_in_turns(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pdus = []
    for seed in range(300):
        room = RoomBuilder("11", seed=seed, sign=False)
        room.create(ADMIN)
        pdus += room.pdus
    async with LoopTurns() as turns:
        turns.watch(monkeypatch, receive, "parse")
        results = await store.append(pdus)
    assert {one.outcome for one in results} == {"stored"}
    assert turns.total == 2 * len(pdus)
    assert turns.most <= 2 * ITEMS


async def test_a_page_has_a_bounded_number_of_values(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = of_lists(11)
    last = room.message(ADMIN, "the end")
    await deliver(store, room)
    shown, token, pages = list[EventId](), None, 0
    async with LoopTurns() as turns:
        turns.watch(monkeypatch, events, "read_trusted", lambda raw, **_: len(raw))
        while True:
            page = await store.messages(room.room_id, LOCAL, from_=token, limit=100)
            found = await store.client_events(LOCAL, page.chunk)
            shown += [EventId(one["event_id"]) for one in found]
            assert sum(one.raw.count(b"[") for one in page.chunk) <= VALUES_MAX
            token, pages = page.end, pages + 1
            if token is None:
                break
    everything = [one.event_id for one in room.events]
    assert shown == everything[::-1]
    assert shown[0] == last.event_id
    assert pages == 3
    assert turns.most <= 2 * TURN_BYTES


async def test_a_page_has_an_event_however_large(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "VALUES_MAX", 10)
    room = of_lists(3)
    await deliver(store, room)
    page = await store.messages(room.room_id, LOCAL, limit=5)
    assert [one.event_id for one in page.chunk] == [room.events[-1].event_id]
    assert page.end is not None
    found = await store.sync(LOCAL, timeline_limit=5)
    timeline = found.join[RoomId(room.room_id)].timeline
    assert [one.event_id for one in timeline.events] == [room.events[-1].event_id]
    assert timeline.limited
    rest = await store.messages(room.room_id, LOCAL, from_=timeline.prev_batch, limit=1)
    assert [one.event_id for one in rest.chunk] == [room.events[-2].event_id]


async def test_a_timeline_has_a_bounded_number_of_values(store: Store) -> None:
    room = of_lists(8)
    await deliver(store, room)
    found = await store.sync(LOCAL, timeline_limit=100)
    timeline = found.join[RoomId(room.room_id)].timeline
    assert sum(one.raw.count(b"[") for one in timeline.events) <= VALUES_MAX
    assert timeline.limited
    page = await store.messages(room.room_id, LOCAL, from_=timeline.prev_batch, limit=100)
    both = [*timeline.events[::-1], *page.chunk]
    assert [one.event_id for one in both] == [one.event_id for one in room.events[::-1]]


async def test_short_events_are_not_counted(store: Store) -> None:
    """Neither are long ones of few values, such as texts."""
    room = new_room(members=[LOCAL])
    for number in range(50):
        room.message(ADMIN, "x" * 60_000 if number % 10 == 0 else "short")
    await deliver(store, room)
    page = await store.messages(room.room_id, LOCAL, limit=100)
    assert len(page.chunk) == len(room.events)


def test_a_long_text_is_read_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    states = list[bool]()
    loads = orjson.loads

    def watched(raw: bytes) -> Any:
        states.append(gc.isenabled())
        return loads(raw)

    monkeypatch.setattr(orjson, "loads", watched)
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        reading.loads(b"[" + b" " * reading.LARGE + b"]")
        reading.loads(b"[]")
        with pytest.raises(ValueError, match="depth"):
            reading.loads(b"[" * (reading.LARGE + 1))
        assert states == [False, True, False]
        assert gc.isenabled()
        gc.disable()
        reading.loads(b" " * reading.LARGE + b"1")
        assert not gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()


async def test_a_large_state_is_shown_in_turns(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = new_room(members=[LOCAL, *(f"@u{number}:s2.test" for number in range(500))])
    await deliver(store, room)
    found = await store.members(RoomId(room.room_id))
    async with LoopTurns() as turns:
        turns.watch(monkeypatch, client_page, "_formatted")
        shown = await store.client_events(LOCAL, found, as_state=True)
    assert len(shown) == turns.total == len(found)
    assert turns.most <= ITEMS
    response = await store.sync(LOCAL)
    async with LoopTurns() as turns:
        turns.watch(monkeypatch, events, "read_trusted")
        await responses.sync(store, LOCAL, response)
    assert turns.total >= 490
    assert turns.most <= ITEMS


async def test_many_invites_are_shown_in_turns(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(250):
        room = RoomBuilder("11", seed=seed, sign=False)
        room.start(f"@a{seed}:s2.test")
        invite = room.invite(f"@a{seed}:s2.test", LOCAL)
        await store.append([invite.pdu], room_version="11", origin="out_of_band")
    async with LoopTurns() as turns:
        turns.watch(monkeypatch, sync_response, "stripped")
        found = await store.sync(LOCAL)
    assert len(found.invite) == turns.total == 250
    assert turns.most <= ITEMS


async def test_many_rows_are_made_in_turns() -> None:
    rows = list(range(2 * TURN_ROWS + 1))
    async with LoopTurns() as turns:

        def made(row: int) -> int:
            turns.note()
            return row + 1

        assert await mapped(made, rows) == [row + 1 for row in rows]
    assert turns.total == len(rows)
    assert turns.most == TURN_ROWS


@pytest.mark.parametrize("call", ["events", "rooms"])
async def test_many_ids_are_read_in_parts(
    store: Store, statements: StatementLog, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    room = new_room()
    await deliver(store, room)
    monkeypatch.setattr(events, "EVENTS_MAX", 100)
    monkeypatch.setattr(room_info, "ROOMS_MAX", 100)
    sigil, given = ("$", room.events[-1].event_id) if call == "events" else ("!", room.room_id)
    ids = [*(f"{sigil}{number}:s2.test" for number in range(250)), given]
    statements.take()
    found = await getattr(store, call)(ids)
    assert list(found) == [given]
    assert len(statements.take()) == 3


async def test_others_run_before_a_long_list_is_sent() -> None:
    for size, turns_taken in ((TURN_ROWS, 0), (TURN_ROWS + 1, 1)):
        async with LoopTurns() as turns:
            before = turns.number
            await pause_if_long(5, ["$id"] * size)
            assert turns.number - before == turns_taken


async def test_other_servers_name_a_thousand_events(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = new_room(members=["@user2:s2.test"])
    said = [room.message(ADMIN, str(number)) for number in range(3)]
    await deliver(store, room)
    given = list[int]()
    missing = Store.missing_events

    async def noted(self: Any, room_id: Any, early: Any, late: Any, **how: Any) -> Any:
        given.extend((len(early), len(late)))
        return await missing(self, room_id, early, late, **how)

    monkeypatch.setattr(Store, "missing_events", noted)
    many = [f"${number}" for number in range(100_000)]
    body = {
        "earliest_events": [said[0].event_id, *many],
        "latest_events": [said[2].event_id, *many],
    }
    responder = Responder(Receiver(store, None))  # type: ignore[arg-type]
    found = await responder.missing_events("s2.test", RoomId(room.room_id), body)
    assert [one["content"]["body"] for one in found["events"]] == ["1"]
    assert given == [1_000, 1_000]


async def test_a_child_is_queued_after_the_large_batch_of_its_parents(store: Store) -> None:
    room = new_room(members=[f"@u{number}:s2.test" for number in range(400)])
    child = room.message(ADMIN, "the child")
    *parents, last = room.pdus
    results = await asyncio.gather(
        store.append(parents, room_version="11"), store.append([last], room_version="11")
    )
    assert [one.outcome for one in results[1]] == ["stored"]
    assert {one.outcome for one in results[0]} == {"stored"}
    assert await store.event(child.event_id) is not None
    twice = await asyncio.gather(*(store.append(parents, room_version="11") for _ in range(3)))
    assert {one.outcome for batch in twice for one in batch} == {"duplicate"}
    assert store.writer.version_waiters == 0


async def test_the_data_of_a_large_batch_is_loaded_in_steps(
    store: Store, statements: StatementLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = new_room(members=[f"@u{number}:s2.test" for number in range(1_500)])
    for outcome in ("stored", "duplicate", "duplicate"):
        async with LoopTurns() as turns:
            turns.watch(monkeypatch, prefetch, "_look")
            results = await store.append(room.pdus, room_version="11")
        assert {one.outcome for one in results} == {outcome}
        assert turns.total >= len(room.pdus)
        assert turns.most <= EVENTS_PER_LOAD
        store.writer.caches.forget()
    await store.append(room.pdus, room_version="11")
    statements.sent.clear()
    again = await store.append(room.pdus, room_version="11")
    assert {one.outcome for one in again} == {"duplicate"}
    assert SQL_LOAD_BATCH not in [one for _, one in statements.sent]


@pytest.mark.parametrize(
    "kind, values",
    [
        ("text", ["$plain", 'a"b', "back\\slash", "{a,b}", "NULL", "", " ", "\u00e9", "\x01"]),
        ("bigint", [0, -1, 2**63 - 1]),
    ],
)
async def test_a_long_list_is_sent_as_text(store: Store, kind: str, values: list[Any]) -> None:
    long = values * (TURN_ROWS // len(values) + 1)
    sql = f"SELECT $2::{kind}[] || $1::{kind}[] WHERE $3::text = 'one'"
    sent, first, *rest = await long_lists_as_text((sql, long, values, "one"))
    assert isinstance(first, str)
    assert rest == [values, "one"]
    assert sent.count("SELECT $1::text::") == 1
    async with store.database.connection() as conn:
        assert await conn.fetchval(sql, long, values, "one") == [*values, *long]
        any_of = f"SELECT x FROM unnest($2::{kind}[]) AS x WHERE x = ANY($1::{kind}[])"
        assert await conn.fetchvals(any_of, long, values) == values


async def test_a_list_whose_type_is_not_named_stays_one() -> None:
    long: list[Any] = [b"1"] * (TURN_ROWS + 1)
    for sql in (
        "SELECT f($1)",
        "SELECT $1::bytea[]",
        "SELECT $1::text[], $1",
        "SELECT $10::text[]",
    ):
        assert await long_lists_as_text((sql, long)) == (sql, long)


@pytest.mark.parametrize("make", [list, iter, set])
async def test_a_long_list_is_checked_in_parts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f"${number}" for number in range(3 * TURN_ROWS)]
    async with LoopTurns() as turns:
        turns.watch(monkeypatch, arguments, "events", len)
        found = await arguments.many(arguments.events, make([*ids, *ids]))
    assert found == ids if make is not set else set(found) == set(ids)
    assert turns.most == TURN_ROWS
    with pytest.raises(InvalidIdentifier):
        await arguments.many(arguments.events, make([*ids, "!room"]))
    with pytest.raises(InputError):
        await arguments.many(arguments.events, "$" * (TURN_ROWS + 1))


async def test_the_context_of_an_event_has_a_bounded_number_of_values(store: Store) -> None:
    room = of_lists(11)
    await deliver(store, room)
    lists = [one.event_id for one in room.events[-11:]]
    found = await store.context(EventId(lists[5]), LOCAL, limit=20)
    around = [*found.events_before[::-1], found.event, *found.events_after]
    assert sum(one.raw.count(b"[") for one in around) <= VALUES_MAX
    assert [one.event_id for one in around] == lists[3:7]
    before = await store.messages(room.room_id, LOCAL, from_=found.start, limit=1)
    after = await store.messages(room.room_id, LOCAL, from_=found.end, direction="f", limit=1)
    assert [one.event_id for one in (*before.chunk, *after.chunk)] == [lists[2], lists[7]]


async def test_a_page_of_threads_has_a_bounded_number_of_values(store: Store) -> None:
    room = of_lists(11)
    roots = room.events[-11:]
    for root in roots:
        room.threaded(ADMIN, root, "reply")
    await deliver(store, room)
    shown, token, pages = list[EventId](), None, 0
    while True:
        page = await store.threads(room.room_id, LOCAL, from_=token, limit=20)
        assert sum(one.raw.count(b"[") for one in page.chunk) <= VALUES_MAX
        shown += [one.event_id for one in page.chunk]
        token, pages = page.end, pages + 1
        if token is None:
            break
    assert shown == [one.event_id for one in roots[::-1]]
    assert pages == 3
