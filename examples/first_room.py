"""Store a room, sync two users, page back.

`RoomBuilder` plays the homeservers: it makes signed events. Run it with a DSN in STORAGE_DSN, or
without one on the embedded Postgres (`pip install 'room-storage[embedded]'`):

    python first_room.py
"""

import asyncio
import os
import time

import storage
from storage.testing import RoomBuilder

ALICE, BOB = "@alice:s1.test", "@bob:s1.test"


async def main() -> None:
    """Store the room and print what its members get."""
    room = RoomBuilder("12", seed=time.time_ns())  # a new room each time
    room.start(ALICE, name="The pantry")
    room.join(BOB)
    room.message(ALICE, "The key hangs behind the door.")

    dsn = os.environ.get("STORAGE_DSN")
    async with storage.open(dsn, server_name="s1.test", migrate=True) as store:
        for result in await store.append(room.pdus, verify_keys=room.keys):
            print(result.outcome, result.event_id)

        first = await store.sync(BOB)
        print("first sync:", [event.type for event in first.join[room.room_id].timeline.events])

        await store.append([room.message(ALICE, "And the cellar is locked.").pdu])
        second = await store.sync(BOB, since=first.next_batch)
        print("next sync:", [event.content for event in second.join[room.room_id].timeline.events])

        page = await store.messages(room.room_id, BOB, limit=3)
        print("the last three:", [event.type for event in page.chunk])
        page = await store.messages(room.room_id, BOB, from_=page.end, limit=3)
        print("before them:", [event.type for event in page.chunk])


asyncio.run(main())
