"""The world of a generated room: users, servers, partitions, and the builder of each side.

A *side* is a set of servers that receive the same events. Mostly there is one. A partition makes
several, each with a branch of its own, until it heals and the next event has all their heads as
parents.
"""

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Unpack

from storage.ids import EventId
from storage.testing.assembly import EventOptions, first_ms, number_of, server_of
from storage.testing.builder import RoomBuilder
from storage.testing.model import BuiltEvent

# --------------------------------------------------------------------------------------------------
# Kinds of rooms: members, servers, rates of actions, and rates of partitions.


@dataclass(frozen=True, slots=True)
class Odd:
    """Rates per event of odd things. All are 0 in an ordinary room."""

    late: float = 0.0
    """A delivery is late, though never after an event that cites it: only forks can be late."""
    content_hash: float = 0.0
    """A message whose content hash is wrong: stored as redacted."""
    false_depth: float = 0.0
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
    false_depth=0.001,
    rejected=0.01,
    soft_failed=0.005,
    bad_signature=0.003,
    oversized=0.001,
    early_redaction=0.005,
    respelled=0.02,
)
"""A little of everything odd."""


# --------------------------------------------------------------------------------------------------
# Users and texts: seeded choice of users, neutral text, lengths like those of real rooms.

_SYLLABLES: Final = (
    "ka",
    "lo",
    "mi",
    "ren",
    "tu",
    "sol",
    "vé",
    "dan",
    "piü",
    "ost",
    "ra",
    "nim",
    "ße",
    "gor",
    "ell",
    "日",
    "wy",
    "三",
    "fe",
    "qua",
)
_TEXT_WORDS: Final = 4_000
_MEAN_LOG_LENGTH: Final = 4.7
_SPREAD_LOG_LENGTH: Final = 0.9
_LENGTH_MAX: Final = 4_000


class Roster:
    """A set of users with a random draw at constant cost, in a reproducible order."""

    def __init__(self, users: Iterable[str] = ()) -> None:
        self._users = list(users)
        self._positions = {user: position for position, user in enumerate(self._users)}

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, user: object) -> bool:
        return user in self._positions

    def __iter__(self) -> Iterator[str]:
        return iter(self._users)

    def add(self, user: str) -> None:
        """Add a user; one who is in stays in place."""
        if user not in self._positions:
            self._positions[user] = len(self._users)
            self._users.append(user)

    def discard(self, user: str) -> None:
        """Remove a user, if in; the last one moves to the free position."""
        position = self._positions.pop(user, None)
        if position is None:
            return
        last = self._users.pop()
        if last != user:
            self._users[position] = last
            self._positions[last] = position

    def draw(self, rng: random.Random, *, skew: float = 1.0) -> str | None:
        """Return a user, None if there is none; a `skew` above 1 prefers a few of them."""
        if not self._users:
            return None
        return self._users[int(len(self._users) * rng.random() ** skew)]


def server_names(count: int) -> tuple[str, ...]:
    """Return ``s1.test`` to ``s<count>.test``."""
    return tuple(f"s{number}.test" for number in range(1, count + 1))


def _made_text() -> str:
    rng = random.Random(0)  # noqa: S311  (text, not secrets)
    return " ".join(
        "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(_TEXT_WORDS)
    )


_TEXT: Final = _made_text()


def text(rng: random.Random) -> str:
    """Return a message body: mostly a line, rarely some thousand characters.

    The length is log-normal, 165 characters on average.
    """
    length = min(
        _LENGTH_MAX, int(math.exp(_MEAN_LOG_LENGTH + _SPREAD_LOG_LENGTH * rng.gauss(0, 1))) + 1
    )
    start = int(rng.random() * (len(_TEXT) - length))
    return _TEXT[start : start + length].strip() or "ok"


def letters(rng: random.Random, length: int) -> str:
    """Return random letters and digits, like those of media ids and ciphertexts."""
    return f"{rng.getrandbits(length * 5):x}".ljust(length, "0")[:length]


def profile(rng: random.Random, user_id: str) -> dict[str, Any]:
    """Return the display name and avatar of a member event."""
    name, server = user_id[1:].split(":", 1)
    return {"avatar_url": f"mxc://{server}/{letters(rng, 24)}", "displayname": name.capitalize()}


def message(rng: random.Random) -> dict[str, Any]:
    """Return the content of a message: text, formatted text, or an image."""
    kind = rng.random()
    body = text(rng)
    if kind < 0.85:
        return {"body": body, "msgtype": "m.text"}
    if kind < 0.94:
        return {
            "body": body,
            "format": "org.matrix.custom.html",
            "formatted_body": f"<p>{body}</p>",
            "msgtype": "m.text",
        }
    info = {
        "h": rng.randint(100, 2_000),
        "mimetype": "image/png",
        "size": rng.randint(10_000, 5_000_000),
        "w": rng.randint(100, 2_000),
    }
    return {
        "body": "image.png",
        "info": info,
        "msgtype": "m.image",
        "url": f"mxc://s1.test/{letters(rng, 24)}",
    }


def encrypted(rng: random.Random) -> dict[str, Any]:
    """Return the content of m.room.encrypted, with noise for a ciphertext."""
    return {
        "algorithm": "m.megolm.v1.aes-sha2",
        "ciphertext": letters(rng, rng.randint(200, 500)),
        "device_id": letters(rng, 10).upper(),
        "sender_key": letters(rng, 43),
        "session_id": letters(rng, 43),
    }


RECENT_MAX: Final = 64
PARTIAL_HEAL_RATE: Final = 0.1
TRIES: Final = 20
GAP_MS_MEAN: Final = 20_000
NODES_MAX: Final = 20_000
MODERATORS_MAX: Final = 12


class RecentMessage(NamedTuple):
    """A message that may be answered, edited, redacted."""

    event_id: EventId
    sender: str
    thread: EventId | None


@dataclass(slots=True)
class PartitionSide:
    """One side of a partition, or the whole."""

    room: RoomBuilder
    recent: deque[RecentMessage] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))


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
        self.former_members: Roster = Roster()
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
        self.side_of = {name: self.sides[index % width] for index, name in enumerate(names)}
        self.partition_left = 1 + width * (
            1 + int(-math.log(1 - self.rng.random()) * self.shape.fork_depth)
        )

    def _heal(self) -> None:
        self.room.merge(*(side.room for side in self.sides))
        self.whole.recent.extend(
            message
            for side in self.sides
            for message in list(side.recent)[-RECENT_MAX // len(self.sides) :]
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
        self.side(sender).recent.append(RecentMessage(node.event_id, sender, thread))
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
            ("leave", self.former_members),
            ("knock", self.knocking),
        ):
            if name == membership:
                roster.add(user)
            else:
                roster.discard(user)
