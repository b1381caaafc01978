"""The rooms of the demonstration: the story, and generated ones of several versions and kinds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from storage.cli.demo.story import ALICE, DemoStory, write
from storage.errors import UnknownRoom
from storage.ids import RoomId
from storage.store.facade import Store
from storage.testing import (
    ODD_SOME,
    SHAPES,
    GeneratedRoom,
    RoomBuilder,
    Shape,
    build_room,
    deliver_with_gap,
    generate_room,
    write_ndjson,
)

SEEDS_PER_RUN: Final = 100
FIRST_SEED: Final = 8_000

# An import without keys accepts bad signatures, and refuses events that are too large.
ODD: Final = replace(ODD_SOME, bad_signature=0.0, oversized=0.0)

KINDS: Final[tuple[tuple[str, str, str, int], ...]] = (
    ("a chat", "small_chat", "10", 600),
    ("two people, encrypted", "direct_chat", "11", 300),
    ("many servers, odd events", "busy_federation", "11", 800),
    ("forks and merges", "fork_heavy", "9", 500),
    ("coming and going", "join_leave_storm", "6", 500),
    ("an old room", "small_chat", "2", 300),
)
GAP: Final = ("a gap, filled later", "small_chat", "7", 240)


@dataclass(frozen=True, slots=True)
class DemoRoom:
    """One room with its description."""

    what: str
    room: GeneratedRoom


async def first_seed(store: Store) -> int:
    """Return a seed whose rooms are not stored yet, so that you can repeat the demonstration."""
    seed = FIRST_SEED
    while await _is_held(store, RoomId(f"!room{seed}:s1.test")):
        seed += SEEDS_PER_RUN
    return seed


async def _is_held(store: Store, room_id: RoomId) -> bool:
    try:
        await store.forward_extremities(room_id)
    except UnknownRoom:
        return False
    return True


def make(seed: int) -> tuple[DemoStory, list[DemoRoom]]:
    """Return the story and all rooms, the story's room first."""
    story = write(seed)
    return story, [DemoRoom("a story", story.room.generated()), *_generated(seed + 1)]


def _generated(seed: int) -> Iterator[DemoRoom]:
    for number, (what, shape, version, count) in enumerate(KINDS):
        yield DemoRoom(
            what, generate_room(_shape(what, shape), count, seed=seed + number, version=version)
        )
    yield DemoRoom("the newest version", _newest(seed))
    what, shape, version, count = GAP
    built = build_room(SHAPES[shape], count, seed=seed + len(KINDS), version=version)
    yield DemoRoom(what, deliver_with_gap(built, count // 3, count // 2))


def _newest(seed: int) -> GeneratedRoom:
    """Generate a room of version 12, whose id is the hash of its create event.

    The create event contains the seed, so that the id differs in each run.
    """
    room = RoomBuilder("12", seed=seed)
    room.start(ALICE, content={"test.demo.seed": seed}, name="Hashed")
    members = [room.user(number) for number in range(2, 8)]
    for user in members:
        room.join(user)
    asked = [
        room.message(members[number % 6], f"{number} bottles of plum juice")
        for number in range(60, 0, -1)
    ]
    room.edit(asked[0].sender, asked[0], "61 bottles of plum juice")
    room.ban(ALICE, members[-1])
    return room.generated()


def _shape(what: str, name: str) -> Shape:
    return SHAPES[name].replaced(odd=ODD) if "odd" in what else SHAPES[name]


def to_files(rooms: list[DemoRoom], folder: Path) -> tuple[list[str], int]:
    """Write an NDJSON file for each room; return the paths and the number of bytes."""
    paths = [folder / f"{number}.ndjson" for number in range(len(rooms))]
    for room, path in zip(rooms, paths, strict=True):
        write_ndjson(room.room, path)
    return list(map(str, paths)), sum(path.stat().st_size for path in paths)
