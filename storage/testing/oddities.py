"""Faults in rooms, by name of the rate in `Odd`.

Each function returns the events in order of delivery, or none.
"""

from collections.abc import Callable, Mapping
from typing import Final

from storage.testing import assembly
from storage.testing import world as population
from storage.testing.assembly import DEPTH_MAX, Damage, depth_max, number_of
from storage.testing.model import BuiltEvent
from storage.testing.world import GeneratedWorld

Oddity = Callable[[GeneratedWorld], list[BuiltEvent]]


def _damaged(world: GeneratedWorld, damage: Damage) -> list[BuiltEvent]:
    sender = world.speaker()
    if sender is None:
        return []
    content = population.message(world.rng)
    return [world.send(sender, "m.room.message", content, damage=damage)]


def content_hash(world: GeneratedWorld) -> list[BuiltEvent]:
    """Send a message whose content does not match its hash."""
    return _damaged(world, "content_hash")


def bad_signature(world: GeneratedWorld) -> list[BuiltEvent]:
    """Send a message signed with another key."""
    return _damaged(world, "signature")


def oversized(world: GeneratedWorld) -> list[BuiltEvent]:
    """Send a message of more than 65,536 bytes."""
    return _damaged(world, "oversized")


def false_depth(world: GeneratedWorld) -> list[BuiltEvent]:
    """Send a message with a false depth: the largest, 0, a small or a random one.

    From version 6 on it may also be negative.
    """
    sender = world.speaker()
    if sender is None:
        return []
    largest = depth_max(world.room.version)
    claims = [largest, 0, 1, world.rng.randint(2, 10_000)]
    if number_of(world.room.version) >= 6:
        claims.append(-DEPTH_MAX)
    return [
        world.send(
            sender, "m.room.message", population.message(world.rng), depth=world.rng.choice(claims)
        )
    ]


def rejected(world: GeneratedWorld) -> list[BuiltEvent]:
    """Send a message by a banned, absent or unknown user, or a topic without the power."""
    banned = world.banned.draw(world.rng)
    if banned is not None and world.rng.random() < 0.5 and not world.is_joined(banned):
        return [
            world.send(banned, "m.room.message", population.message(world.rng), expected="rejected")
        ]
    ordinary = world.speaker()
    if (
        ordinary is not None
        and world.level(world.side(ordinary), ordinary) < 50
        and world.rng.random() < 0.5
    ):
        content = {"topic": population.text(world.rng)}
        return [world.send(ordinary, "m.room.topic", content, state_key="", expected="rejected")]
    stranger = world.newcomer()
    return [
        world.send(stranger, "m.room.message", population.message(world.rng), expected="rejected")
    ]


def soft_failed(world: GeneratedWorld) -> list[BuiltEvent]:
    """Ban a user, then send a message of that user that claims to be from before the ban."""
    host, target = world.moderator(), world.speaker(skew=1.0)
    if not world.is_whole or host is None or target is None or target in world.moderators:
        return []
    if world.level(world.whole, target) >= world.level(world.whole, host):
        return []
    ban = world.member(host, target, "ban")
    late = world.send(
        target,
        "m.room.message",
        population.message(world.rng),
        prev=ban.prev_events,
        expected="soft_failed",
    )
    return [ban, late]


def early_redaction(world: GeneratedWorld) -> list[BuiltEvent]:
    """Redact an event on another branch than its target, which comes later."""
    sender, host = world.speaker(), world.moderator()
    if not world.is_whole or sender is None or host is None:
        return []
    parents = world.room.heads
    target = world.send(sender, "m.room.message", assembly.text(population.text(world.rng)))
    content = {"redacts": target.event_id} if number_of(world.room.version) >= 11 else {}
    redaction = world.send(host, "m.room.redaction", content, redacts=target.event_id, prev=parents)
    return [redaction, target]


ODDITIES: Final[Mapping[str, Oddity]] = {
    oddity.__name__: oddity
    for oddity in (
        content_hash,
        bad_signature,
        oversized,
        false_depth,
        rejected,
        soft_failed,
        early_redaction,
    )
}
