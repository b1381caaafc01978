"""Kinds of rooms: members, servers, rates of actions, and rates of partitions."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Odd:
    """Rates per event of odd things. All are 0 in an ordinary room."""

    late: float = 0.0
    """A delivery is late, though never after an event that cites it: only forks can be late."""
    content_hash: float = 0.0
    """A message whose content hash is wrong: stored as redacted."""
    depth_lie: float = 0.0
    """A message that claims any depth; servers carry the largest one on."""
    rejected: float = 0.0
    """An event that its own state does not allow: by banned users, strangers, or without power."""
    soft_failed: float = 0.0
    """A ban, and a message by the banned user with a parent before it."""
    bad_signature: float = 0.0
    oversized: float = 0.0
    early_redaction: float = 0.0
    """A redaction on another branch than its target, delivered before it."""
    respelled: float = 0.0
    """The same JSON in other bytes: key order, spaces, escapes. Hashes and ids stay."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of room. `replaced` makes a variant."""

    name: str
    version: str = "11"
    servers: int = 3
    members: int = 12
    """How many users join before the mix below takes over."""
    rush: float = 0.5
    """Until then: the share of joins among the events."""
    newcomers: float = 0.6
    """The share of joins by new users; the others return, while there are any."""
    skew: float = 3.0
    """Inequality of the speakers; 1 is equal."""
    mix: Mapping[str, float] = field(default_factory=dict)
    """Weights of the actions, by name (`storage.testing.actions`)."""
    join_rule: str = "public"
    history_visibility: str = "shared"
    fork_rate: float = 0.0
    """New partitions, per event."""
    fork_depth: float = 3.0
    """Mean number of events of one side of a partition."""
    fork_width: int = 2
    """Sides of a partition, at most."""
    odd: Odd = Odd()

    def replaced(self, **changes: Any) -> "Shape":
        """Return the shape with other values."""
        return replace(self, **changes)


TALK: Final[Mapping[str, float]] = {
    "message": 62,
    "reply": 8,
    "thread": 5,
    "reaction": 12,
    "edit": 4,
    "redaction": 1.5,
}
COMING_AND_GOING: Final[Mapping[str, float]] = {
    "join": 2,
    "leave": 1.5,
    "profile": 1.5,
    "invite": 0.5,
    "reject": 0.1,
    "knock": 0.2,
    "kick": 0.1,
    "ban": 0.15,
    "unban": 0.08,
}
HOUSEKEEPING: Final[Mapping[str, float]] = {
    "power": 0.15,
    "topic": 0.2,
    "name": 0.1,
    "visibility": 0.05,
    "join_rule": 0.05,
}
ALL_ACTIONS: Final[Mapping[str, float]] = {**TALK, **COMING_AND_GOING, **HOUSEKEEPING}

SMALL_CHAT: Final = Shape("small_chat", mix=ALL_ACTIONS, fork_rate=0.01)
DIRECT_CHAT: Final = Shape(
    "direct_chat",
    servers=2,
    members=2,
    rush=1.0,
    skew=1.0,
    mix={"encrypted": 85, "reaction": 10, "redaction": 2, "profile": 1},
    join_rule="invite",
    history_visibility="invited",
    fork_rate=0.02,
    fork_depth=2,
)
BIG_ROOM: Final = Shape("big_room", servers=40, members=5_000, mix=ALL_ACTIONS, fork_rate=0.005)
HUGE_ROOM: Final = Shape("huge_room", servers=200, members=50_000, mix=ALL_ACTIONS, fork_rate=0.002)
JOIN_LEAVE_STORM: Final = Shape(
    "join_leave_storm",
    servers=20,
    members=200,
    newcomers=0.1,
    skew=1.0,
    mix={
        "message": 10,
        "join": 50,
        "leave": 45,
        "profile": 5,
        "kick": 0.5,
        "ban": 0.5,
        "unban": 0.2,
        "visibility": 0.1,
    },
    fork_rate=0.01,
)
FORK_HEAVY: Final = Shape(
    "fork_heavy",
    servers=6,
    members=30,
    skew=1.5,
    mix={
        **TALK,
        **{key: 4 * weight for key, weight in (*COMING_AND_GOING.items(), *HOUSEKEEPING.items())},
    },
    fork_rate=0.5,
    fork_depth=3,
    fork_width=4,
)
BUSY_FEDERATION: Final = Shape(
    "busy_federation",
    servers=100,
    members=1_000,
    mix=ALL_ACTIONS,
    fork_rate=0.08,
    fork_depth=1.5,
    fork_width=3,
)

SHAPES: Final[Mapping[str, Shape]] = {
    shape.name: shape
    for shape in (
        SMALL_CHAT,
        DIRECT_CHAT,
        BIG_ROOM,
        HUGE_ROOM,
        JOIN_LEAVE_STORM,
        FORK_HEAVY,
        BUSY_FEDERATION,
    )
}

ODD_SOME: Final = Odd(
    late=0.05,
    content_hash=0.005,
    depth_lie=0.001,
    rejected=0.01,
    soft_failed=0.005,
    bad_signature=0.003,
    oversized=0.001,
    early_redaction=0.005,
    respelled=0.02,
)
"""A little of everything odd."""
