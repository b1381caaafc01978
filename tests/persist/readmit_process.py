"""A process that readmits all refused events of a room, and is killed on the way.

It kills itself a moment after it begins its n-th statement: at once, or some milliseconds later.
"""

import asyncio
import random
import sys

import storage
from storage import EventId, Store
from storage.testing import RoomBuilder, build_room
from storage.testing.world import ALL_ACTIONS, Odd, Shape
from tests.federation.partial_process import Killer
from tests.persist.planning import SERVER

SHAPE = Shape("kills", mix=ALL_ACTIONS, members=6, fork_rate=0.2, odd=Odd(early_redaction=0.05))


def room_of(seed: int) -> tuple[RoomBuilder, list[EventId]]:
    """The room, and a third of its events in the order in which they are readmitted."""
    room = build_room(SHAPE, 40, seed=seed, sign=False)
    ids = [event.event_id for event in room.events[8:]]
    return room, random.Random(seed).sample(ids, len(ids) // 3)


async def fill(store: Store, seed: int) -> None:
    """Append the room; a third of it is refused."""
    room, ids = room_of(seed)
    await store.append(room.pdus, room_version=room.version, refused=dict.fromkeys(ids, "spam"))


async def readmit(dsn: str, seed: int, killer: Killer) -> None:
    """Readmit what the caller refused: some of the events may be refused by the rules."""
    async with storage.open(dsn, server_name=SERVER, observer=killer) as store:
        ids = room_of(seed)[1]
        stored = await store.events(ids)
        for event_id in ids:
            if stored[event_id].refused is not None:
                await store.readmit(event_id)


if __name__ == "__main__":
    name, chosen, n, delay = sys.argv[1:]
    asyncio.run(readmit(name, int(chosen), Killer(int(n), float(delay))))
