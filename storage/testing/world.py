"""The world of a generated room: users, servers, partitions, and the builder of each side.

A *side* is a set of servers that receive the same events. Mostly there is one. A partition makes
several, each with a branch of its own, until it heals and the next event has all their heads as
parents.
"""

import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Unpack

from storage.ids import EventId
from storage.testing.assembly import EventOptions, first_ms
from storage.testing.builder import RoomBuilder
from storage.testing.drafting import number_of, server_of
from storage.testing.model import BuiltEvent
from storage.testing.population import Roster, profile, server_names
from storage.testing.shapes import Shape

RECENT_MAX: Final = 64
PARTIAL_HEAL_RATE: Final = 0.1
TRIES: Final = 20
GAP_MS_MEAN: Final = 20_000
NODES_MAX: Final = 20_000
MODERATORS_MAX: Final = 12


class Said(NamedTuple):
    """A message that may be answered, edited, redacted."""

    event_id: EventId
    sender: str
    thread: EventId | None


@dataclass(slots=True)
class PartitionSide:
    """One side of a partition, or the whole."""

    room: RoomBuilder
    recent: deque[Said] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))


class GeneratedWorld:
    """Everything that changes while a room is generated. Determined by shape and seed."""

    def __init__(
        self,
        shape: Shape,
        seed: int,
        *,
        sign: bool = True,
        version: str | None = None,
        exact: bool = False,
    ) -> None:
        self.shape = shape
        self.rng: random.Random = random.Random(f"{shape.name}/{seed}")  # noqa: S311  (the same room every time)
        names = server_names(shape.servers)
        self.room: RoomBuilder = RoomBuilder(
            version or shape.version,
            servers=names,
            seed=seed,
            sign=sign,
            checked=False,
            exact=exact,
        )
        self.whole: PartitionSide = PartitionSide(self.room)
        self.sides: list[PartitionSide] = [self.whole]
        self.side_of: dict[str, PartitionSide] = dict.fromkeys(names, self.whole)
        self.partition_left: int = 0
        self.now_ms: int = first_ms(seed)
        self.users: int = 1
        self.creator: str = self.room.user(1)
        self.joined: Roster = Roster()
        self.invited: Roster = Roster()
        self.banned: Roster = Roster()
        self.gone: Roster = Roster()
        self.knocking: Roster = Roster()
        self.moderators: list[str] = [self.creator]

    # Servers that see each other, and do not

    def advance_partitions(self) -> None:
        """Begin, continue or heal a partition."""
        if self.partition_left > 0:
            self.partition_left -= 1
            if self.partition_left == 0:
                self._heal()
            elif len(self.sides) > 2 and self.rng.random() < PARTIAL_HEAL_RATE:
                self._heal_two()
        elif len(self.side_of) > 1 and self.rng.random() < self.shape.fork_rate:
            self._part()

    def _part(self) -> None:
        width = self.rng.randint(2, max(2, min(self.shape.fork_width, len(self.side_of))))
        self.sides = [
            PartitionSide(branch, self.whole.recent.copy()) for branch in self.room.fork(width)
        ]
        names = self.rng.sample(list(self.side_of), len(self.side_of))
        busy = (
            {server_of(self.creator), *(server_of(user) for user in self.joined)}
            if len(self.joined) <= len(names)
            else set(names)
        )
        names.sort(key=lambda name: name not in busy)
        self.side_of = {name: self.sides[place % width] for place, name in enumerate(names)}
        self.partition_left = 1 + width * (
            1 + int(-math.log(1 - self.rng.random()) * self.shape.fork_depth)
        )

    def _heal(self) -> None:
        self.room.merge(*(side.room for side in self.sides))
        self.whole.recent.extend(
            said
            for side in self.sides
            for said in list(side.recent)[-RECENT_MAX // len(self.sides) :]
        )
        self.sides = [self.whole]
        self.side_of = dict.fromkeys(self.side_of, self.whole)

    def _heal_two(self) -> None:
        """Heal two sides while others are still cut off: a merge of merges follows."""
        left, right = self.rng.sample(self.sides, 2)
        left.room.merge(right.room)
        left.recent.extend(list(right.recent)[-RECENT_MAX // 2 :])
        self.sides.remove(right)
        self.side_of = {
            name: left if side is right else side for name, side in self.side_of.items()
        }

    @property
    def is_whole(self) -> bool:
        """Return whether all servers are connected and the last partition is merged."""
        return self.partition_left == 0 and len(self.room.heads) == 1

    def trim(self) -> None:
        """Drop the past, if that is possible and worth it."""
        if self.is_whole and len(self.room.graph.nodes) > max(NODES_MAX, 2 * len(self.room.state)):
            self.room.graph.trim(self.room.heads[0])

    # Users

    def side(self, user: str) -> PartitionSide:
        """Return the side of a user's server."""
        return self.side_of[server_of(user)]

    def is_joined(self, user: str) -> bool:
        """Return whether a user is joined on its own side."""
        return self.side(user).room.membership(user) == "join"

    def speaker(self, *, skew: float | None = None) -> str | None:
        """Return a user who is joined on the own side.

        The creator where others are hard to find.
        """
        for _ in range(TRIES):
            user = self.joined.draw(self.rng, skew=self.shape.skew if skew is None else skew)
            if user is not None and self.is_joined(user):
                return user
        return self.creator if self.is_joined(self.creator) else None

    def newcomer(self) -> str:
        self.users += 1
        return (
            self.room.user(self.users)
            if self.users <= len(self.side_of)
            else self._skewed_newcomer()
        )

    def _skewed_newcomer(self) -> str:
        names = self.room.settings.servers
        return self.room.user(self.users, names[int(len(names) * self.rng.random() ** 2)])

    def level(self, side: PartitionSide, user: str) -> float:
        """Return a user's power level on a side."""
        if user == self.creator and number_of(self.room.version) >= 12:
            return math.inf
        content = side.room.content("m.room.power_levels")
        level: float = content.get("users", {}).get(user, content.get("users_default", 0))
        return level

    def moderator(self, level: int = 50) -> str | None:
        """Return a joined user with at least that level on the own side."""
        for user in self.rng.sample(self.moderators, len(self.moderators)):
            if self.is_joined(user) and self.level(self.side(user), user) >= level:
                return user
        return None

    # Saying something

    def send(
        self,
        sender: str,
        type_: str,
        content: Mapping[str, Any],
        *,
        state_key: str | None = None,
        redacts: str | None = None,
        **how: Unpack[EventOptions],
    ) -> BuiltEvent:
        """Send an event on the side of `sender`, with a timestamp and keys like a real one."""
        self.now_ms += 1 + int(-math.log(1 - self.rng.random()) * GAP_MS_MEAN)
        extra: dict[str, Any] = {"unsigned": {"age_ts": self.now_ms}}
        if number_of(self.room.version) <= 10:
            extra["origin"] = server_of(sender)
        dressed: EventOptions = {"ts": self.now_ms, "extra": extra, **how}
        node = self.side(sender).room.send(
            sender, type_, content, state_key=state_key, redacts=redacts, **dressed
        )
        if node.expected is None and node.type == "m.room.member":
            self._note_membership(str(state_key), str(content["membership"]))
        return node

    def say(
        self, sender: str, type_: str, content: Mapping[str, Any], *, thread: EventId | None = None
    ) -> BuiltEvent:
        """Send a message that others can refer to."""
        node = self.send(sender, type_, content)
        self.side(sender).recent.append(Said(node.event_id, sender, thread))
        return node

    def member(
        self, sender: str, target: str, membership: str, via: str | None = None
    ) -> BuiltEvent:
        """Send a membership, with a profile for joins and invites."""
        content: dict[str, Any] = {"membership": membership}
        if membership in ("join", "invite", "knock"):
            content |= profile(self.rng, target)
        if via is not None:
            content["join_authorised_via_users_server"] = via
        return self.send(sender, "m.room.member", content, state_key=target)

    def _note_membership(self, user: str, membership: str) -> None:
        for name, roster in (
            ("join", self.joined),
            ("invite", self.invited),
            ("ban", self.banned),
            ("leave", self.gone),
            ("knock", self.knocking),
        ):
            if name == membership:
                roster.add(user)
            else:
                roster.discard(user)
