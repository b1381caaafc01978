"""Rooms of a shape and a size: as an iterator with bounded memory, a list, or a builder.

A million events need only the memory of the room's state and a window of recent events.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from signedjson.types import VerifyKey

from storage.ids import EventId, RoomId
from storage.testing import assembly
from storage.testing import world as population
from storage.testing.actions import ACTIONS, message
from storage.testing.assembly import verify_keys
from storage.testing.builder import RoomBuilder
from storage.testing.delivery import respell
from storage.testing.model import BuiltEvent, GeneratedEvent, GeneratedRoom
from storage.testing.oddities import ODDITIES
from storage.testing.world import GeneratedWorld, Shape

LATE_MOST: Final = 50
"""At most so many others overtake a late event."""
TRIM_EVERY: Final = 1_000


@dataclass(frozen=True, slots=True)
class RoomStream:
    """A room that is generated during iteration: each time the same events."""

    shape: Shape
    count: int
    seed: int
    sign: bool
    room_id: RoomId
    room_version: str
    keys: Mapping[tuple[str, str], VerifyKey]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[GeneratedEvent]:
        world = GeneratedWorld(self.shape, self.seed, sign=self.sign, version=self.room_version)
        made = itertools.islice(_endless(world, trim=True), self.count)
        late, respelled = self.shape.odd.late, self.shape.odd.respelled
        rng = random.Random(self.seed)  # noqa: S311  (the same delivery every time)
        delivered = with_late_events(made, late, rng) if late else made
        for event in delivered:
            delivery = event.generated()
            yield respell(delivery, rng) if respelled and rng.random() < respelled else delivery


def stream_room(
    shape: Shape, count: int, *, seed: int = 0, version: str | None = None, sign: bool = True
) -> RoomStream:
    """Return a room of exactly `count` events.

    Without `sign` they are hashed only (twice as fast).

    `version` replaces the shape's. The order of delivery is that of creation, except for events
    that `shape.odd` makes late.
    """
    world = GeneratedWorld(shape, seed, sign=sign, version=version)
    next(_beginning(world))
    room = world.room
    return RoomStream(
        shape, count, seed, sign, room.room_id, room.version, verify_keys(room.settings.servers)
    )


def generate_room(
    shape: Shape, count: int, *, seed: int = 0, version: str | None = None, sign: bool = True
) -> GeneratedRoom:
    """Return the room of `stream_room`, in memory."""
    stream = stream_room(shape, count, seed=seed, version=version, sign=sign)
    return GeneratedRoom(stream.room_id, stream.room_version, tuple(stream), stream.keys)


def build_room(
    shape: Shape,
    count: int,
    *,
    seed: int = 0,
    version: str | None = None,
    sign: bool = True,
    exact: bool = True,
) -> RoomBuilder:
    """Return a builder with a room of `count` events and all their states.

    With `exact` the states at merges are those of `storage.auth.resolve`; else see
    `storage.testing.graph`.
    """
    world = GeneratedWorld(shape, seed, sign=sign, version=version, exact=exact)
    for _ in itertools.islice(_endless(world, trim=False), count):
        pass
    world.room.merge(*(side.room for side in world.sides))
    return world.room


def _endless(world: GeneratedWorld, *, trim: bool) -> Iterator[BuiltEvent]:
    yield from _beginning(world)
    names, weights = list(world.shape.mix), list(itertools.accumulate(world.shape.mix.values()))
    odd = [
        (name, getattr(world.shape.odd, name))
        for name in ODDITIES
        if getattr(world.shape.odd, name) > 0
    ]
    for step in itertools.count():
        world.advance_partitions()
        yield from _oddity(world, odd) or _ordinary(world, names, weights)
        if trim and step % TRIM_EVERY == 0:
            world.trim()


def _beginning(world: GeneratedWorld) -> Iterator[BuiltEvent]:
    """Yield the first events as clients create them.

    They are create, join, power levels, join rules, history visibility, guest access and name.
    """
    creator, shape, room = world.creator, world.shape, world.room
    yield room.create(creator, ts=world.now_ms)
    yield world.member(creator, creator, "join")
    yield world.send(
        creator,
        "m.room.power_levels",
        assembly.power_levels(room.version, [creator], None),
        state_key="",
    )
    yield world.send(
        creator, "m.room.join_rules", assembly.join_rules(shape.join_rule, []), state_key=""
    )
    visibility = {"history_visibility": shape.history_visibility}
    yield world.send(creator, "m.room.history_visibility", visibility, state_key="")
    yield world.send(creator, "m.room.guest_access", {"guest_access": "can_join"}, state_key="")
    yield world.send(
        creator, "m.room.name", {"name": population.text(world.rng)[:60]}, state_key=""
    )


def _oddity(world: GeneratedWorld, odd: Iterable[tuple[str, float]]) -> list[BuiltEvent]:
    for name, rate in odd:
        if world.rng.random() < rate:
            return ODDITIES[name](world)
    return []


def _ordinary(world: GeneratedWorld, names: list[str], weights: list[float]) -> list[BuiltEvent]:
    """Return one event by the mix, or nothing if nobody can speak.

    If the drawn action is impossible now, return a message instead.
    """
    waiting = len(world.joined) < world.shape.members
    name = (
        "join"
        if waiting and world.rng.random() < world.shape.rush
        else world.rng.choices(names, cum_weights=weights)[0]
    )
    node = ACTIONS[name](world) or message(world)
    return [] if node is None else [node]


def with_late_events(
    events: Iterable[BuiltEvent], rate: float, rng: random.Random, *, most: int = LATE_MOST
) -> Iterator[BuiltEvent]:
    """Yield the events in another order: up to `most` others overtake some of them.

    None of the others cites the late event. Only in forks can an event be late. One that is
    expected to soft-fail stays in place, and so do its dependencies.
    """
    delayed: dict[EventId, tuple[BuiltEvent, int]] = {}
    for index, event in enumerate(events):
        for cited in (*event.prev_events, *event.auth_events):
            if cited in delayed:
                yield delayed.pop(cited)[0]
        if event.expected is None and event.prev_events and rng.random() < rate:
            delayed[event.event_id] = event, index + rng.randint(1, most)
        else:
            yield event
        for event_id in [event_id for event_id, (_, due) in delayed.items() if due <= index]:
            yield delayed.pop(event_id)[0]
    for waiting, _ in delayed.values():
        yield waiting
