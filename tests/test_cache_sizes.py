"""One size for all caches: the bytes of their entries are about as large as the shares assume."""

import gc
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from multiprocessing import get_context

import psutil
import pytest

import storage
from storage import Config
from storage.cache_sizes import MEGABYTE, SHARES, CacheSizes
from storage.database.names import InternedNames
from storage.ids import EventId, UserId, intern
from storage.persist.model.caches import BoundedCache, StateGroupCache
from storage.persist.model.rows import RoomRow
from storage.persistent_map import IntMap, changed
from storage.queries.sliding.connection import NO_ROOMS, ClientRoom, Connections
from storage.queries.sliding.room_state import NOTHING, RoomFacts
from storage.queries.sliding.user_rooms import Columns, ListChanges
from storage.state.groups import DeltaRow, Group
from storage.streams.caches import Cache, LastChange, MemberIds, ReadCaches, RoomsOf
from storage.testing import RoomBuilder
from storage.visibility.multirange import EMPTY

ENTRIES = 4_000
MANY = 200_000  # entries that a process is measured by
STREAMS = 5  # that have rooms or users as keys


def room_id(number: int) -> str:
    return f"!{number:018d}abcdefgh:example.org"


def user_id(number: int) -> UserId:
    return UserId(f"@someone{number:08d}:server{number % 97}.example.org")


def event_id(number: int) -> EventId:
    return EventId(f"${number:043d}")


def names() -> object:
    known = InternedNames(ENTRIES)
    half = range(ENTRIES // 2)
    known.learn(principals=[(user_id(number), number) for number in half])
    known.learn(state_keys=[((2, user_id(number)), number) for number in half])
    return known


def memberships() -> object:
    """Return the rooms of users who have most of their rooms in common."""
    cache: Cache[RoomsOf] = Cache("rooms_of", ENTRIES, lambda rooms: 1 + len(rooms.joined))
    for user in range(ENTRIES // 100):
        joined = {intern(room_id(user + number)): 5_000 + user + number for number in range(100)}
        cache.fill(cache.ticket(user_id(user)), RoomsOf(joined, 7))
    return cache


def whole_states() -> object:
    caches: ReadCaches[str, dict[tuple[str, UserId], EventId]] = ReadCaches(
        events=0, rooms=0, memberships=0, state_entries=2 * ENTRIES, listening_since=0
    )
    for group in range(ENTRIES // 100):
        events = [event_id(100 * group + number) for number in range(100)]
        members = [user_id(100 * group + number) for number in range(100)]
        state = {
            ("m.room.member", user): event for user, event in zip(members, events, strict=True)
        }
        caches.states.fill(caches.states.ticket(str(group)), state)
        ids = MemberIds(group, [UserId(user + "x") for user in members])
        caches.members.fill(caches.members.ticket(room_id(group)), ids)
        chain = frozenset(EventId(event + "x") for event in events)
        caches.chains.keep(frozenset([EventId(f"${group}")]), chain, 0)
        caches.chains.keep_placed([EventId(event + "y") for event in events], 0)
    return caches


def room_lists() -> object:
    rows = [
        (number, room_id(number), 5, 2**33 + number, 2**34 + number, False, True, False, None)
        for number in range(ENTRIES)
    ]
    columns = [Columns(rows[at : at + 1_000]) for at in range(0, ENTRIES, 1_000)]
    facts = {
        room_id(number): RoomFacts("m.space", is_encrypted=True, name=f"Name {number}")
        for number in range(ENTRIES)
    }
    children: Cache[frozenset[str]] = Cache("space_children", ENTRIES, lambda one: 1 + len(one))
    for space in range(ENTRIES // 20):
        ids = frozenset(room_id(20 * space + number) for number in range(20))
        children.fill(children.ticket(room_id(space)), ids)
    return columns, facts, children


def sliding_rooms(count: int) -> object:
    """Return the rooms of connections; the client has everything of two thirds of them."""
    connections = Connections(2 * count)
    for nid in range(count // 10_000):
        same: dict[ClientRoom, ClientRoom] = {}
        sent = {}
        for number in range(1_000, 11_000):
            upto = number + 2**33 if number % 3 == 0 else None
            room = ClientRoom(upto, None, None, 20, NOTHING, is_direct=False)
            sent[number] = same.setdefault(room, room)
        connections.keep(nid, 1, changed(NO_ROOMS, sent))
    return connections


def state_entries(count: int) -> object:
    cache = StateGroupCache(1_000, 2 * count)
    for group in range(count // 10_000):
        delta = {1_000 + number: 2**33 + number for number in range(10_000)}
        row = DeltaRow(group, delta)
        cache.keep({group: Group(group, 1, changed(IntMap(), delta), (row,), (1,), 0, 0)})
    return cache


def rooms() -> object:
    """Return the rows of the writer, and what readers know of changed rooms."""
    rows: BoundedCache[str, RoomRow] = BoundedCache(ENTRIES)
    caches: ReadCaches[str, dict[str, str]] = ReadCaches(
        events=0, rooms=ENTRIES, memberships=0, state_entries=0, listening_since=0
    )
    lists = ListChanges(ENTRIES, lambda _, __: None, lambda _: None)
    for number in range(ENTRIES):
        at = 2**33 + number
        rows[room_id(number)] = RoomRow(
            number,
            room_id(number),
            "11",
            at,
            at,
            at,
            at,
            (at,),
            at,
            EMPTY,
            0,
            is_partial=False,
            in_order_ts=at,
        )
        for changes in (caches.room_changes, caches.state_changes, lists.facts):
            changes.note(room_id(number), at)
        lists.account_data.note(user_id(number), at)
        lists.rooms.note(room_id(number), at, at, is_event=True)
    return rows, caches, lists


def notifier_keys() -> object:
    keys = [LastChange(ENTRIES, 0) for _ in range(STREAMS)]
    for changes in keys:
        for number in range(ENTRIES):
            changes.note(user_id(number), 2**33 + number)
    return keys


def bytes_of(make: Callable[[], object]) -> int:
    """Return the memory that the result of a function takes."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        del made
        gc.collect()
        return before - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def resident_bytes_of(make: Callable[[int], object]) -> int:
    """Return by how much a new process grows. Also what is not Python's: persistent maps."""
    process = psutil.Process()
    before = process.memory_info().rss
    made = make(MANY)
    gc.collect()
    grown: int = process.memory_info().rss - before
    del made
    return grown


def check(name: str, taken: float) -> None:
    assumed = SHARES[name].entry_bytes
    assert 0.6 * assumed < taken < 1.3 * assumed, f"{taken:.0f} bytes instead of {assumed}"


@pytest.mark.parametrize(
    "make", [names, memberships, whole_states, room_lists, rooms, notifier_keys]
)
def test_an_entry_takes_about_what_is_assumed(make: Callable[[], object]) -> None:
    check(make.__name__, bytes_of(make) / ENTRIES)


@pytest.mark.parametrize("make", [state_entries, sliding_rooms])
def test_an_entry_of_a_persistent_map_takes_about_what_is_assumed(
    make: Callable[[int], object],
) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        grown = processes.submit(resident_bytes_of, make).result(60)
    check(make.__name__, grown / MANY)


async def test_an_event_and_a_state_of_the_writer_take_about_what_is_assumed(dsn: str) -> None:
    async with storage.open(dsn, server_name="s1.test") as store:
        built = [RoomBuilder("11", seed=seed) for seed in range(60)]
        for room in built:
            admin = room.user(1)
            room.start(admin)
            for number in range(6):
                room.message(admin, f"message {number}")
        tracemalloc.start()
        try:
            for room in built:
                await store.append(room.pdus)
            await store.rooms_of(built[0].user(1))  # after the writer is done
            caches = store.writer.caches
            events, groups = len(caches.rows), len(caches.groups)
            sizes = []
            for forget in (
                lambda: [one.clear() for one in (caches.groups, caches.merged, caches.counts)],
                caches.forget,
            ):
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
                forget()
                gc.collect()
                sizes.append(before - tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert events == sum(len(room.pdus) for room in built)
    check("events", (sizes[0] + sizes[1]) / events)
    assert sizes[0] / groups < SHARES["groups"].entry_bytes


def test_the_shares_are_the_whole() -> None:
    assert sum(share.percent for share in SHARES.values()) == 100
    assert SHARES.keys() == {field.name for field in fields(CacheSizes)}
    for cache_mb in (0, 1, Config().cache_mb, 1 << 20):
        sizes = asdict(CacheSizes.of(cache_mb))
        taken = sum(sizes[name] * share.entry_bytes for name, share in SHARES.items())
        assert taken <= cache_mb * MEGABYTE
        assert taken >= cache_mb * MEGABYTE * 0.98
    assert set(asdict(CacheSizes.of(0)).values()) == {0}
