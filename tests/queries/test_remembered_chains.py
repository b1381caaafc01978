"""Auth chains that a process remembers: until maintenance commits, in whichever process that is."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

import storage
from storage import Store
from storage.errors import UnknownEvent
from storage.ids import EventId
from storage.maintenance.purge import PurgeJob, purge_history, purge_room
from storage.queries.auth_chain import SQL_AUTH_CHAIN, SQL_LOOSE, auth_chain_ids
from storage.rebuild import Rebuilder, rebuild
from storage.streams.caches import CHAINS_MAX, ChainMemory
from storage.testing import build_room
from tests.maintenance.rooms import LIVELY, SERVER
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, deliver, ids, new_room
from tests.small_limits import purges_in_batches

QUIET = storage.Config(follow_ms=3_600_000, purge_pause_ms=0)
small_batches = purges_in_batches(20)


@pytest.fixture
async def store(dsn: str, statements: StatementLog) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER, config=QUIET, observer=statements) as opened:
        yield opened


@pytest.fixture
async def other(dsn: str) -> AsyncIterator[Store]:
    """A store of another process, which this one does not hear of."""
    async with storage.open(dsn, server_name=SERVER, config=QUIET, instance_name="other") as opened:
        yield opened


async def chains(store: Store, sets: Sequence[list[EventId]]) -> list[set[EventId] | str]:
    """Return the chains of these sets, as remembered or not."""
    return [await chain(store, one) for one in sets]


async def chain(store: Store, event_ids: list[EventId]) -> set[EventId] | str:
    try:
        return await store.auth_chain_ids(event_ids)
    except UnknownEvent as error:
        return str(error)


async def read_again(store: Store, sets: Sequence[list[EventId]]) -> list[set[EventId] | str]:
    """Return the same by a reader that remembers nothing."""
    found: list[set[EventId] | str] = []
    async with store.database.connection() as conn:
        for event_ids in sets:
            try:
                found.append(await auth_chain_ids(conn, event_ids))
            except UnknownEvent as error:
                found.append(str(error))
    return found


async def test_a_chain_is_read_once(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    state = list((await store.current_state(room.room_id)).values())
    first = await store.auth_chain_ids(state)
    assert first
    again = await store.auth_chain_ids(reversed(state))
    assert again == first
    again.clear()
    assert await store.auth_chain_ids(state) == first, "the caller may change what is returned"
    assert statements.take().count(SQL_AUTH_CHAIN) == 1
    assert (store.caches.chains.hits, store.caches.chains.misses) == (2, 1)


async def test_events_with_a_position_are_looked_up_once(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL])
    states = [set(room.state.values())]
    for number in range(3):
        room.power_levels(ADMIN, users={ADMIN: 100, LOCAL: number})
        states.append(set(room.state.values()))
    await deliver(store, room)
    first = await store.auth_chain_difference(states[1:3])
    assert first == {room.events[-3].event_id}
    assert await store.auth_chain_difference(states[1:3]) == first
    assert statements.take().count(SQL_LOOSE) == 1
    assert await store.auth_chain_difference(states[2:]) == {room.events[-2].event_id}
    assert statements.take().count(SQL_LOOSE) == 1, "for the last power levels"


async def test_events_that_are_not_stored_are_not_remembered(store: Store) -> None:
    room = new_room(members=[LOCAL])
    late = room.topic(ADMIN, "late")
    await store.append(room.pdus[:-1])
    state = list(room.state.values())
    before = await store.auth_chain_ids(state)
    assert len(store.caches.chains) == 0
    await store.append([late.pdu])
    assert await store.auth_chain_ids(state) == before | {*late.auth_events}


@pytest.mark.parametrize("whole", [False, True])
async def test_after_each_transaction_of_a_purge(
    store: Store, other: Store, *, whole: bool
) -> None:
    """Another process purges, and this one hears nothing of it."""
    room = build_room(LIVELY, 150, seed=4, sign=False)
    await other.append(room.pdus, room_version=room.version)
    events = ids(event for event in room.events if event.state_key is not None)
    rng = random.Random(1)
    sets = [rng.sample(events, size) for size in (1, 1, 3, 10, 20, 30)] + [events]
    compared = 0

    async def compare(_: PurgeJob) -> None:
        nonlocal compared
        for _turn in range(2):
            assert await chains(store, sets) == await read_again(store, sets)
        compared += 1

    before = await chains(store, sets)
    if whole:
        await purge_room(
            other.database, room.room_id, server_name=SERVER, force=True, watcher=compare
        )
    else:
        await purge_history(
            other.database,
            room.room_id,
            server_name=SERVER,
            before_event_id=room.events[-10].event_id,
            local=True,
            watcher=compare,
        )
    assert compared > 3
    after = await chains(store, sets)
    assert after == await read_again(store, sets)
    assert (after == before) is not whole
    assert store.caches.chains.hits > 0


async def repaired(dsn: str, room_id: str) -> None:
    async with storage.open(dsn, server_name=SERVER, config=QUIET, instance_name="third") as third:
        await rebuild(third.database, room_id, server_name=SERVER)


async def rebuilt(dsn: str, room_id: str) -> None:
    async with Rebuilder.opened(dsn, SERVER) as rebuilder:
        await rebuilder.rebuild(room_id)


@pytest.mark.parametrize("how", [repaired, rebuilt])
async def test_after_the_cover_is_made_again(
    dsn: str, store: Store, how: Callable[[str, str], Awaitable[None]]
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    sets = [list(room.state.values())]
    right = await read_again(store, sets)
    async with store.database.connection() as conn:
        await conn.execute("UPDATE auth_chains SET link_1 = NULL")
    assert await chains(store, sets) != right
    await how(dsn, room.room_id)
    assert await chains(store, sets) == right
    assert await chains(store, sets) == right


def some(*numbers: int) -> frozenset[EventId]:
    return frozenset(EventId(f"${number}") for number in numbers)


def test_the_memory_is_bounded() -> None:
    memory = ChainMemory(10)
    memory.keep(some(1), some(2, 3), 0)
    memory.keep(some(2), some(3, 4, 5), 0)
    assert memory.chain(some(1), 0) == some(2, 3)
    memory.keep(some(4), some(5, 6, 7), 0)
    assert [memory.chain(some(one), 0) for one in (1, 2, 4)] == [some(2, 3), None, some(5, 6, 7)]
    memory.keep(some(5), some(*range(10, 20)), 0)
    assert memory.chain(some(5), 0) is None, "larger than the whole memory"
    assert len(memory) == 2
    memory.keep_placed(some(1, 2, 3, 4, 5, 6), 0)
    memory.keep_placed(some(6, 7, 8, 9, 10), 0)
    assert memory.without_placed(set(some(1, 9)), 0) == some(1)
    memory.keep_placed(some(*range(100)), 0)
    assert not memory.may_know_placed(set(some(*range(100))))


def test_many_small_chains_are_dropped_too() -> None:
    memory = ChainMemory(10 * CHAINS_MAX)
    for number in range(2 * CHAINS_MAX):
        memory.keep(some(number), some(), 0)
    assert len(memory) == CHAINS_MAX


def test_a_reader_that_is_behind_uses_nothing_and_adds_nothing() -> None:
    memory = ChainMemory(10)
    memory.keep(some(1), some(2), 7)
    memory.keep_placed(some(1), 7)
    assert memory.chain(some(1), 6) is None
    assert memory.without_placed(set(some(1)), 6) == some(1)
    memory.keep(some(3), some(2), 6)
    memory.keep_placed(some(3), 6)
    assert memory.chain(some(1), 7) == some(2)
    assert memory.chain(some(3), 7) is None
    assert memory.without_placed(set(some(1, 3)), 7) == some(3)
    assert memory.chain(some(1), 8) is None
    assert memory.chain(some(1), 7) is None
    assert not memory.may_know_placed(set(some(1, 3)))
