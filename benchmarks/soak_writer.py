"""One writer of the soak (benchmarks/soak.py), a process that the soak kills.

  python -m benchmarks.soak_writer DSN NAME FIRST WRITERS INDEX

Pairs of rooms are numbered (benchmarks/soak_rooms.py). A writer appends its share of each pair, one
run of events in every WRITERS, and waits for the others while parents are missing. If the others do
not write them, it appends all events of the pair. It prints the number of a pair before it begins,
and "rejected EVENT_ID REASON" for an event that must not be rejected. It never ends by itself.
"""

import asyncio
import itertools
import logging
import random
import sys
import time
from collections.abc import Sequence
from typing import Final

import storage
from benchmarks.soak_rooms import SERVER, pair, runs
from storage import AppendResult, Store
from storage.testing import GeneratedEvent

CONFIG: Final = storage.Config(pool_size_max=4, follow_ms=100, connect_timeout_ms=5_000)
RUN: Final = 8  # consecutive events of one writer
STALLED_SECONDS: Final = 1.5
PAUSE_SECONDS: Final = 0.02


def quiet() -> None:
    """Hide log records about Postgres going away, which the soak causes itself."""
    logging.getLogger("storage").setLevel(logging.ERROR)
    logging.getLogger("asyncpg").setLevel(logging.CRITICAL)


async def append_run(store: Store, events: Sequence[GeneratedEvent]) -> list[AppendResult]:
    """Append events of one origin.

    Only an outlier needs the version of its room; others come after the create event.
    """
    given = {
        event.event_id: event.state_before for event in events if event.state_before is not None
    }
    versions = {event.room_version for event in events}
    version = versions.pop() if len(versions) == 1 else None
    return await store.append(
        [event.pdu for event in events],
        room_version=version,
        origin=events[0].origin,
        state_before=given or None,
    )


async def append_mixed(store: Store, events: Sequence[GeneratedEvent]) -> list[GeneratedEvent]:
    """Append events of several origins; return those whose parents or room are missing."""
    lacking: list[GeneratedEvent] = []
    for run in runs(events):
        for event, result in zip(run, await append_run(store, run), strict=True):
            if result.outcome in {"missing_parents", "invalid"}:
                lacking.append(event)
            elif result.outcome == "rejected" and event.expected is None:
                sys.stdout.write(f"rejected {event.event_id} {result.reason}\n")
                sys.stdout.flush()
    return lacking


async def write_pair(store: Store, mine: list[GeneratedEvent], chance: random.Random) -> bool:
    """Append these events, with retries while parents are missing.

    Return False if there is no progress for a while.
    """
    moved = time.monotonic()
    while mine and time.monotonic() - moved < STALLED_SECONDS:
        size = chance.randint(1, 20)
        try:
            lacking = await append_mixed(store, mine[:size])
        # InputError: state that another writer has yet to store
        except (storage.DatabaseError, storage.InputError):
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        if len(lacking) < len(mine[:size]):
            moved = time.monotonic()
            mine = lacking + mine[size:]
        await asyncio.sleep(PAUSE_SECONDS * chance.random())
    return not mine


async def main(dsn: str, name: str, *, first: int, writers: int, index: int) -> None:
    """Write pairs of rooms until killed."""
    chance = random.Random(f"{name} {first} {time.time_ns()}")
    while True:
        try:
            async with storage.open(
                dsn, server_name=SERVER, instance_name=name, config=CONFIG
            ) as store:
                for number in itertools.count(first):
                    sys.stdout.write(f"{number}\n")
                    sys.stdout.flush()
                    events = await asyncio.to_thread(pair, number)
                    if not await write_pair(
                        store,
                        [event for at, event in enumerate(events) if at // RUN % writers == index],
                        chance,
                    ):
                        # The other writers are dead, or write another pair.
                        await write_pair(store, events, chance)
                    first = number
        except storage.DatabaseError:
            await asyncio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    quiet()
    given = sys.argv
    asyncio.run(
        main(given[1], given[2], first=int(given[3]), writers=int(given[4]), index=int(given[5]))
    )
