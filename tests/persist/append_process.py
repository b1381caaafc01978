"""A writer process for tests that kill it: it appends a room's messages until it dies.

It prints a line on standard output per commit.
"""

import asyncio
import sys

import storage
from storage.testing import RoomBuilder

CONFIG = storage.Config(follow_ms=50, pool_size_max=2)
MESSAGES = 3_000
BATCH = 7


def room_of(number: int) -> RoomBuilder:
    """The room of this process: the same bytes wherever it is called."""
    room = RoomBuilder("11", seed=number, sign=False)
    room.start(room.user(1))
    for _ in range(MESSAGES):
        room.message(room.user(1), "x")
    return room


async def main(dsn: str, instance_name: str, number: int, at: int) -> None:
    room = room_of(number)
    async with storage.open(
        dsn, server_name="s1.test", instance_name=instance_name, config=CONFIG
    ) as store:
        while at < len(room.pdus):
            await store.append(room.pdus[at : at + BATCH])
            at += BATCH
            sys.stdout.write(f"{at}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
