"""A backup is restored under open stores: the room lists of a process are those of the new one."""

import pytest

from storage import SlidingFilter, Store, UnknownPos
from storage.ids import RoomId
from storage.testing import RoomBuilder
from tests.failover import ReplicatedPair
from tests.sliding.client import SlidingClient
from tests.streams.lossy import ALICE, FailoverRoom, FeedRecorder, opened

pytestmark = [pytest.mark.timeout(120), pytest.mark.every_postgres]

LOST = SlidingFilter(room_name_like="lost")


async def counts(client: SlidingClient) -> tuple[list[RoomId], int]:
    """Return the rooms of all, and the number of rooms with the lost name, for a new connection."""
    client.pos = None
    rooms = list((await client.sync((0, 19))).rooms)
    client.pos = None
    return rooms, (await client.sync((0, 19), filters=LOST)).lists["all"].count


async def other_room(store: Store, seed: int) -> RoomId:
    room = RoomBuilder("11", seed=seed)
    room.start(ALICE, name="lost" if seed == 1 else None)
    await store.append(room.pdus)
    return room.room_id


async def test_a_restored_backup_has_its_own_room_lists() -> None:
    """A room that was lost, and the name of another one, are in no list; later rooms are.

    The later room has the nid of the lost one.
    """
    room = FailoverRoom()
    async with ReplicatedPair() as pair, opened(pair, "a") as a, opened(pair, "b") as b:
        await room.write(a, 5)
        clients = [SlidingClient(store, ALICE) for store in (a, b)]
        told = FeedRecorder(b)
        await pair.caught_up()
        await pair.detach()
        before, kept = room.stored, room.builder.room_id
        room.builder.name(ALICE, "lost")
        lost = await other_room(a, seed=1)
        await told.reached(await room.write(a, 1))
        for client in clients:
            rooms, count = await counts(client)
            assert (set(rooms), count) == ({lost, kept}, 2)
        late = clients[1].pos
        await pair.back_to_the_copy()
        room.back_to(before)
        await told.reached(await room.write(a, 1))
        for client in clients:
            assert await counts(client) == ([kept], 0)
        clients[1].pos = late
        with pytest.raises(UnknownPos):
            await clients[1].sync((0, 19))
        later = await other_room(a, seed=2)
        await told.reached(await room.write(a, 1))
        for client in clients:
            rooms, count = await counts(client)
            assert (set(rooms), count) == ({later, kept}, 0)
