"""Events are encoded, with the dictionary trained last."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
import pytest

import storage
from storage import StorageCorrupt, Store
from storage.codec import Dictionary, codec, shipped_dictionary, train
from storage.maintenance.reencode import store_dictionary
from storage.rebuild import Rebuilder
from storage.streams.position_poller import follow_once
from storage.testing import (
    SHAPES,
    BuiltEvent,
    GeneratedEvent,
    GeneratedRoom,
    RoomBuilder,
    build_room,
    generate_room,
)
from tests.maintenance.rooms import LIVELY, SERVER, findings
from tests.persist.tables import logical_tables
from tests.stored_bytes import bytes_of, form, forms_of, store_plainly

PLAIN, ZSTD, COMPACT = ord("{"), 0xC1, 0xC2


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def execute(store: Store, sql: str, *args: object) -> None:
    async with store.database.connection() as conn:
        await conn.execute(sql, *args)


async def forms(store: Store) -> dict[str, Any]:
    async with store.database.connection() as conn:
        return await forms_of(conn._driver)


async def append(store: Store, events: Sequence[BuiltEvent | GeneratedEvent]) -> None:
    results = await store.append([event.pdu for event in events])
    assert {result.outcome for result in results} <= {"stored", "rejected", "soft_failed"}


def trained(seed: int = 5) -> Dictionary:
    """A dictionary that no process of the tests knows."""
    room = generate_room(SHAPES["small_chat"], 400, seed=seed)
    return Dictionary(train(((event.pdu, room.room_id) for event in room.events), size=2_048))


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Dictionary:
    """A dictionary that was trained by another process: this one has not registered it."""
    dictionary = trained()
    monkeypatch.setattr(codec, "_readers", dict(codec._readers))
    forget(dictionary)
    return dictionary


def forget(dictionary: Dictionary) -> None:
    """Be a process that has not registered it, nor decoded with it."""
    codec._recent.cache_clear()
    for header in codec.headers_of(dictionary):
        codec._readers.pop(header, None)


async def test_a_room_may_have_events_of_several_forms(store: Store) -> None:
    room = build_room(LIVELY, 90, seed=3)
    await append(store, room.events[:40])
    assert {form(one) for one in (await forms(store)).values()} == {COMPACT}
    await store_plainly(store.database)
    await append(store, room.events[40:])
    found = await forms(store)
    assert [form(found[one.event_id]) for one in room.events[:40]] == [PLAIN] * 40
    assert {form(found[one.event_id]) for one in room.events[40:]} == {COMPACT}
    async with store.database.connection() as conn:
        pdus = {one.event_id: one.pdu for one in room.events}
        assert await bytes_of(conn._driver) == pdus
    assert await findings(store) == []


@pytest.mark.parametrize("version,expected", [("1", {ZSTD}), ("3", {COMPACT}), ("12", {COMPACT})])
async def test_the_form_of_each_room_version(
    store: Store, version: str, expected: set[int]
) -> None:
    room = RoomBuilder(version)
    room.start(f"@user1:{SERVER}")
    for _ in range(3):
        room.message(f"@user1:{SERVER}")
    await append(store, room.events)
    found = await forms(store)
    assert {form(found[one.event_id]) for one in room.events[3:]} == expected
    assert (await store.events([one.event_id for one in room.events])).keys() == found.keys()


async def test_a_new_dictionary_is_used_by_a_writer_that_runs(store: Store) -> None:
    room = generate_room(SHAPES["small_chat"], 60, seed=9)
    await append(store, room.events[:30])
    dictionary = trained()
    await store_dictionary(store.database, dictionary, 400)
    await follow_once(store.database, store.streams)
    await append(store, room.events[30:])
    found = await forms(store)
    assert {found[one.event_id][1:4] for one in room.events[:30]} == {shipped_dictionary().key}
    assert {found[one.event_id][1:4] for one in room.events[30:]} == {dictionary.key}


async def chunk(store: Store, room: GeneratedRoom) -> dict[str, bytes]:
    page = await store.messages(room.room_id, orjson.loads(room.events[0].pdu)["sender"], limit=100)
    return {one.event_id: one.raw for one in page.chunk}


async def test_a_process_that_meets_an_unknown_dictionary_loads_it(
    store: Store, unknown: Dictionary
) -> None:
    """The read is not repeated. A dictionary that is nowhere, or damaged, is an error."""
    room = generate_room(SHAPES["small_chat"], 40, seed=9)
    await store_dictionary(store.database, unknown, 400)
    await append(store, room.events)
    forget(unknown)
    right = await chunk(store, room)
    assert right.items() <= {one.event_id: one.pdu for one in room.events}.items()
    assert len(right) > 20
    forget(unknown)
    for damage in (
        "UPDATE dictionaries SET data = set_byte(data, 9, 255 - get_byte(data, 9))",
        "UPDATE dictionaries SET data = 'x'",
        "DELETE FROM dictionaries",
    ):
        await execute(store, damage)
        with pytest.raises(StorageCorrupt, match="is not stored, or is damaged") as caught:
            await chunk(store, room)
        assert caught.value.ids["dictionary_id"] == unknown.id
        assert caught.value.ids["event_id"] in right
    assert "bytes" in {one.check for one in await findings(store)}
    await append(store, generate_room(SHAPES["small_chat"], 20, seed=10).events)


async def test_a_writer_loads_the_dictionary_of_the_contents_that_it_needs(
    dsn: str, unknown: Dictionary
) -> None:
    room = generate_room(SHAPES["small_chat"], 60, seed=9)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store_dictionary(store.database, unknown, 400)
        await append(store, room.events[:30])
    forget(unknown)
    async with storage.open(dsn, server_name=SERVER) as store:
        await append(store, room.events[30:])
        assert await findings(store) == []


async def test_rebuilding_keeps_each_form(store: Store, dsn: str) -> None:
    room = build_room(LIVELY, 60, seed=3, sign=False)
    await append(store, room.events[:30])
    await store_plainly(store.database)
    await append(store, room.events[30:])
    before, tables = await forms(store), await logical_tables(store.database)
    async with Rebuilder.opened(dsn, SERVER) as rebuilder:
        assert (await rebuilder.rebuild(room.room_id)).events == 0
        await execute(
            store,
            "UPDATE events SET state_group_before = state_group_before + 1000000"
            " WHERE state_group_before IS NOT NULL",
        )
        assert (await rebuilder.rebuild(room.room_id)).events > 0
    assert await forms(store) == before
    assert await logical_tables(store.database) == tables
