"""What tests of purges share: a room, a look at a value, a purge."""

from typing import Any

from storage import Store
from storage.maintenance.purge import purge_history
from storage.streams.following import follow_once
from storage.testing import RoomBuilder
from tests.maintenance.rooms import SERVER

ALICE, BOB = "@alice:s1.test", "@bob:s2.test"


def chat(messages: int) -> RoomBuilder:
    room = RoomBuilder("11")
    room.start(ALICE, name="The pantry")
    room.join(BOB)
    for number in range(messages):
        room.message(BOB if number % 2 else ALICE, f"message {number}")
    return room


async def value(store: Store, sql: str, *args: object) -> Any:
    async with store.database.connection() as conn:
        return await conn.fetchval(sql, *args)


async def purge(store: Store, room: RoomBuilder, at: int, **more: Any) -> int:
    """Purge below an event, and have the store hear of it."""
    point = room.events[at].event_id
    purged = await purge_history(store.database, room.room_id, server_name=SERVER, before_event_id=point, **more)
    await follow_once(store.database, store.streams)
    return purged.events
