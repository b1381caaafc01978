"""A user forgets a room: the next syncs cost what they did, in this process and in others."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import SlidingList, SlidingSyncRequest, Store
from storage.ids import UserId
from storage.queries.sync.changed_rooms import events_of
from storage.streams import SyncToken
from storage.streams.caches import RoomsOf
from storage.streams.position_poller import follow_once
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, deliver, new_room

ALONE = storage.Config(follow_ms=3_600_000)
FRIEND = UserId("@friend:s1.test")


@pytest.fixture
async def reader(dsn: str, statements: StatementLog) -> AsyncIterator[Store]:
    """Another process, which has not heard of what this one does."""
    async with storage.open(
        dsn, server_name="s1.test", instance_name="reader", observer=statements, config=ALONE
    ) as opened:
        yield opened


async def rooms(store: Store) -> tuple[RoomBuilder, RoomBuilder, RoomBuilder]:
    """Two rooms that a user was kicked from, and one with the user and a friend."""
    first, second = (new_room(seed=seed, members=[LOCAL]) for seed in (1, 2))
    both = new_room(seed=3, members=[LOCAL, FRIEND])
    for room in (first, second):
        room.kick(ADMIN, LOCAL)
    for room in (first, second, both):
        await deliver(store, room)
    return first, second, both


async def cost(
    store: Store, both: RoomBuilder, statements: StatementLog, user: UserId
) -> tuple[list[str], list[str]]:
    """Return the statements of a sync without news, and of one after a message."""
    await follow_once(store.database, store.streams)
    token = (await store.sync(user)).next_batch
    await store.sync(user, since=token)
    statements.take()
    assert (await store.sync(user, since=token)).is_empty
    quiet = statements.take()
    both.message(ADMIN)
    await deliver(store, both)
    statements.take()
    assert set((await store.sync(user, since=token)).join) == {both.room_id}
    return quiet, statements.take()


@pytest.mark.parametrize("user", [LOCAL, FRIEND])
async def test_in_the_same_process(reader: Store, statements: StatementLog, user: UserId) -> None:
    """It has no poll during the test."""
    first, second, both = await rooms(reader)
    await reader.forget(LOCAL, first.room_id)
    expected = await cost(reader, both, statements, user)
    await follow_once(reader.database, reader.streams)
    token = (await reader.sync(user)).next_batch
    await reader.sync(user, since=token)
    await reader.forget(LOCAL, second.room_id)
    statements.take()
    assert (await reader.sync(user, since=token)).is_empty
    assert statements.take() == expected[0], "the positions alone"
    assert len(expected[0]) == 1
    assert await cost(reader, both, statements, user) == expected


@pytest.mark.parametrize("user", [LOCAL, FRIEND])
async def test_in_another_process(
    store: Store, reader: Store, statements: StatementLog, user: UserId
) -> None:
    """It has not followed the row yet. Its syncs still know which rooms to read."""
    first, _, both = await rooms(store)
    await follow_once(reader.database, reader.streams)
    token = (await reader.sync(user)).next_batch
    since = events_of(SyncToken.parse(token, reader.deployment_id))
    await reader.sync(user, since=token)
    await store.forget(LOCAL, first.room_id)
    async with reader.database.connection() as conn:
        news = await reader.memory.snapshot(conn, user)
        assert list((news.rooms_of or RoomsOf({}, 0)).joined) == [both.room_id]
        assert news.candidates(since) == []
    statements.take()
    assert (await reader.sync(user, since=token)).is_empty
    assert len(statements.take()) == 2, "the positions, and then what is new"


async def test_a_sliding_sync_of_another_process_is_exact(
    store: Store, reader: Store, statements: StatementLog
) -> None:
    first, *_ = await rooms(store)
    await follow_once(reader.database, reader.streams)
    request = SlidingSyncRequest(lists={"all": SlidingList(ranges=[(0, 9)])})
    known = {}
    for user in (LOCAL, FRIEND):
        found = await reader.sliding_sync(user, request, device_id="PHONE")
        known[user] = await reader.sliding_sync(user, request, device_id="PHONE", pos=found.pos)
    await store.forget(LOCAL, first.room_id)
    statements.take()
    found = await reader.sliding_sync(LOCAL, request, device_id="PHONE", pos=known[LOCAL].pos)
    assert found.lists["all"].count == known[LOCAL].lists["all"].count - 1
    assert sum("cache_invalidations" in one for one in statements.take()) == 2
    await reader.sliding_sync(FRIEND, request, device_id="PHONE", pos=known[FRIEND].pos)
    assert len(statements.take()) <= 2, "the positions, alone and with the connection"
