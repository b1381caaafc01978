"""The rooms of the soak (benchmarks/soak.py) and how they arrive.

Each process makes the same rooms from their numbers. Rooms come in pairs of different versions,
mixed event by event. By its number a room arrives whole, with a gap that is filled late, or joined
over federation: then only its create event comes first.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Final

from storage.testing import (
    GeneratedEvent,
    GeneratedRoom,
    Odd,
    RoomBuilder,
    Shape,
    build_room,
    deliver_with_gap,
)
from storage.testing.world import ALL_ACTIONS

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
    """Return a room with all its events."""
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
