"""One writer of the soak (benchmarks/soak.py), a process to be killed: `python -m benchmarks.soak_writer DSN NAME FIRST WRITERS INDEX EVENTS`.

The rooms are numbered and made from their numbers, so every writer makes the same ones. Of each it appends its share, every so-manieth stretch,
and waits for the others where parents are lacking; where they do not come it appends all of it. It prints the number of a room before it begins, and goes on for ever.
"""

import asyncio
import itertools
import logging
import random
import sys
import time
from typing import Final

import storage
from storage import Store
from storage.testing import BuiltEvent, Odd, Shape, build_room
from storage.testing.shapes import ALL_ACTIONS

SERVER: Final = "s1.test"
SHAPE: Final = Shape(
    "soak",
    servers=4,
    members=16,
    mix={**ALL_ACTIONS, "visibility": 3, "invite": 4, "leave": 4, "redaction": 4},
    fork_rate=0.08,
    odd=Odd(rejected=0.01, soft_failed=0.005, early_redaction=0.01),
)
CONFIG: Final = storage.Config(pool_size_max=4, follow_ms=100, connect_timeout_ms=5_000)
STRETCH: Final = 8  # events in a row that are one writer's
STALLED_SECONDS: Final = 1.5
PAUSE_SECONDS: Final = 0.02


def quiet() -> None:
    """That Postgres goes away is known: nobody need say so."""
    logging.getLogger("storage").setLevel(logging.ERROR)
    logging.getLogger("asyncpg").setLevel(logging.CRITICAL)


def events_of(number: int, count: int) -> list[BuiltEvent]:
    """The events of a room, the same in every process."""
    return list(build_room(SHAPE, count, seed=number, sign=False).events)


async def write_room(store: Store, mine: list[BuiltEvent], chance: random.Random) -> bool:
    """Append these events. What lacks its parents is tried again, until nothing has gone on for a while: then False."""
    moved = time.monotonic()
    while mine and time.monotonic() - moved < STALLED_SECONDS:
        size = chance.randint(1, 20)
        try:
            results = await store.append([event.pdu for event in mine[:size]], room_version=SHAPE.version)
        except storage.DatabaseError:
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        lacking = [event for event, result in zip(mine, results, strict=False) if result.outcome == "missing_parents"]
        if len(lacking) < len(results):
            moved = time.monotonic()
        mine = lacking + mine[size:] if len(lacking) < len(results) else mine
        await asyncio.sleep(PAUSE_SECONDS * chance.random())
    return not mine


async def main(dsn: str, name: str, *, first: int, writers: int, index: int, count: int) -> None:
    """Write rooms until killed."""
    chance = random.Random(f"{name} {first} {time.time_ns()}")
    while True:
        try:
            async with storage.open(dsn, server_name=SERVER, instance_name=name, config=CONFIG) as store:
                for number in itertools.count(first):
                    sys.stdout.write(f"{number}\n")
                    sys.stdout.flush()
                    events = await asyncio.to_thread(events_of, number, count)
                    if not await write_room(store, [event for at, event in enumerate(events) if at // STRETCH % writers == index], chance):
                        await write_room(store, events, chance)  # the others are dead, or in another room
                    first = number
        except storage.DatabaseError:
            await asyncio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    quiet()
    given = sys.argv
    asyncio.run(main(given[1], given[2], first=int(given[3]), writers=int(given[4]), index=int(given[5]), count=int(given[6])))
