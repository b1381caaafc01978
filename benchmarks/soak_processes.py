"""The rooms of the soak (benchmarks/soak.py), and the processes that write them until killed.

  python -m benchmarks.soak_processes writer DSN NAME FIRST WRITERS INDEX
  python -m benchmarks.soak_processes flapper DSN CLIENT…
  python -m benchmarks.soak_processes joiner DSN FIRST

Each process makes the same rooms from their numbers. Rooms come in pairs of different versions,
mixed event by event. By its number a room arrives whole, with a gap that is filled late, or joined
over federation: then only its create event comes first.

A writer appends its share of each pair, one run of events in every WRITERS, and waits for the
others while parents are missing. If the others do not write them, it appends all events of the
pair. It prints the number of a pair before it begins, and "rejected EVENT_ID REASON" for an event
that must not be rejected.

The flapper is a bridge: one user of a small room leaves and rejoins repeatedly, and the soak's
clients are joined to the room. The room's creator writes between the flaps. A new room begins after
some hundred flaps, and after a restart.

The joiner joins one room after another, with the members omitted from the answer. Transactions
arrive before and after the members are known. It starts again at the room whose number it printed
last.
"""

import asyncio
import itertools
import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

import storage
from storage import AppendResult, Store
from storage.testing import (
    GeneratedEvent,
    GeneratedRoom,
    Odd,
    RoomBuilder,
    Shape,
    build_room,
    deliver_with_gap,
    signing_key,
)
from storage.testing.world import ALL_ACTIONS
from tests.federation.partial_worlds import PartialWorld, Replica, Script

SERVER: Final = "s1.test"
EVENTS: Final = 240  # per room
SHAPE: Final = Shape(
    "soak",
    servers=4,
    members=16,
    mix={**ALL_ACTIONS, "visibility": 3, "invite": 4, "leave": 4, "redaction": 4},
    fork_rate=0.08,
    odd=Odd(rejected=0.01, soft_failed=0.005, early_redaction=0.01),
)
VERSIONS: Final = (
    "11",
    "12",
    "1",
    "10",
    "6",
    "3",
    "12",
    "9",
    "2",
    "11",
    "4",
    "12",
    "8",
    "5",
    "7",
    "12",
)


def room_of(number: int) -> RoomBuilder:
    return build_room(
        SHAPE, EVENTS, seed=number, version=VERSIONS[number % len(VERSIONS)], sign=False
    )


def delivery(number: int) -> GeneratedRoom:
    """Return a room as it arrives."""
    room, chance = room_of(number), random.Random(number)
    whole = GeneratedRoom(
        room.room_id, room.version, tuple(event.generated() for event in room.events), room.keys
    )
    count = len(room.events)
    joined_at = chance.randrange(count // 4, count // 2)
    gap_at = chance.randrange(count // 3, 2 * count // 3)
    return (
        whole,
        deliver_with_gap(room, gap_at, gap_at + chance.randrange(5, count // 4)),
        deliver_with_gap(room, 1, joined_at),
    )[number % 3]


def pair(number: int) -> list[GeneratedEvent]:
    """Return the events of the pair of rooms with this number, mixed, each room in its order."""
    rooms = [delivery(2 * number).events, delivery(2 * number + 1).events]
    chance = random.Random(number)
    order = [0] * len(rooms[0]) + [1] * len(rooms[1])
    chance.shuffle(order)
    left = [iter(events) for events in rooms]
    return [next(left[one]) for one in order]


def runs(events: Sequence[GeneratedEvent]) -> Iterator[list[GeneratedEvent]]:
    """Cut events where their origin changes: an append has one."""
    for _, run in itertools.groupby(events, key=lambda event: event.origin):
        yield list(run)


# ------------------------------------------------------------------------------------------------
# a writer

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


async def write_rooms(dsn: str, name: str, *, first: int, writers: int, index: int) -> None:
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


# ------------------------------------------------------------------------------------------------
# the bridge

FLAPS: Final = 400  # per room
CREATOR: Final = f"@bridge:{SERVER}"
FLAPPER: Final = f"@flapper:{SERVER}"


async def send_last(store: Store, room: RoomBuilder, count: int) -> None:
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
    await send_last(store, room, len(room.events))
    for number in range(FLAPS):
        room.join(FLAPPER)
        room.message(CREATOR, f"while joined {number}")
        room.leave(FLAPPER)
        room.message(CREATOR, f"while away {number}")
        await send_last(store, room, 4)
        await asyncio.sleep(PAUSE_SECONDS)


async def flap_rooms(dsn: str, clients: list[str]) -> None:
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


# ------------------------------------------------------------------------------------------------
# joins

OTHERS: Final = ("p1.test", "p2.test", "p3.test")
FIRST_SEED: Final = 10_000_000
"""Seeds of the other rooms of the soak are smaller."""


async def join(dsn: str, number: int) -> None:
    """Play the script of one room, from its start where the database was away."""
    script = await asyncio.to_thread(
        lambda: Script(PartialWorld(FIRST_SEED + number, server=SERVER, others=OTHERS))
    )
    while True:
        try:
            async with storage.open(
                dsn,
                server_name=SERVER,
                instance_name="joiner",
                signing_key=signing_key(SERVER),
                config=CONFIG,
            ) as store:
                await script.play(Replica.of(store, script.world.remote), is_partial=True)
                return
        except storage.DatabaseError:
            await asyncio.sleep(PAUSE_SECONDS)


async def join_rooms(dsn: str, first: int) -> None:
    """Join rooms until killed."""
    for number in itertools.count(first):
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        await join(dsn, number)


def main(kind: str, dsn: str, *given: str) -> None:
    """Run one of the processes. It never ends by itself."""
    quiet()
    if kind == "writer":
        name, first, writers, index = given
        asyncio.run(
            write_rooms(dsn, name, first=int(first), writers=int(writers), index=int(index))
        )
    elif kind == "flapper":
        asyncio.run(flap_rooms(dsn, list(given)))
    else:
        asyncio.run(join_rooms(dsn, int(given[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])
