"""A bridge of the soak (benchmarks/soak.py): `python -m benchmarks.soak_flapper DSN`.

One user of a small room leaves and rejoins repeatedly; the soak's clients are joined to the room.
The room's creator writes between the flaps. A new room begins after some hundred flaps, and after a
restart.
"""

import asyncio
import random
import sys
import time
from typing import Final

import storage
from benchmarks.soak_rooms import SERVER
from benchmarks.soak_writer import CONFIG, PAUSE_SECONDS, quiet
from storage import Store
from storage.testing import RoomBuilder

FLAPS: Final = 400  # per room
CREATOR: Final = f"@bridge:{SERVER}"
FLAPPER: Final = f"@flapper:{SERVER}"


async def send(store: Store, room: RoomBuilder, count: int) -> None:
    """Append the last events of a room, with retries until the database has them.

    Append the whole room if the database has lost their parents.
    """
    while True:
        try:
            results = await store.append(
                [event.pdu for event in room.events[-count:]], room_version=room.version
            )
        except storage.DatabaseError:
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        if all(result.outcome != "missing_parents" for result in results):
            return
        count = len(room.events)


async def flap(store: Store, clients: list[str], seed: int) -> None:
    """Fill one room."""
    room = RoomBuilder(random.Random(seed).choice(["11", "12"]), seed=seed, sign=False)
    room.start(CREATOR, history_visibility="joined")
    for client in clients:
        room.join(client)
    await send(store, room, len(room.events))
    for number in range(FLAPS):
        room.join(FLAPPER)
        room.message(CREATOR, f"while joined {number}")
        room.leave(FLAPPER)
        room.message(CREATOR, f"while away {number}")
        await send(store, room, 4)
        await asyncio.sleep(PAUSE_SECONDS)


async def main(dsn: str, clients: list[str]) -> None:
    """Fill rooms until killed."""
    while True:
        try:
            async with storage.open(
                dsn, server_name=SERVER, instance_name="flapper", config=CONFIG
            ) as store:
                while True:
                    await flap(
                        store, clients, 1_000_000 + time.time_ns() // 1_000_000 % 1_000_000_000
                    )
        except storage.DatabaseError:
            await asyncio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    quiet()
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
