"""Users, servers and contents of the oracle's random rooms, and the helpers that draw from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from hypothesis import strategies as st

from storage import EventFilter
from storage.testing import BuiltEvent, RoomBuilder
from tests.oracle.facts import Audience

T = TypeVar("T")

VERSIONS: Final = ("1", "2", "3", "6", "9", "10", "11", "12")
USERS: Final = tuple(f"@user{number}:s{1 + number % 3}.test" for number in range(1, 6))
SERVERS: Final = ("s1.test", "s2.test", "s3.test", "s4.test")
AUDIENCE: Final = Audience(USERS, SERVERS)
DEVICES: Final = ("PHONE", "DESK")

NO_VISIBILITIES: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {"history_visibility": "friends"},
    {"history_visibility": ["joined"]},
    {"history_visibility": None},
)
Write = Callable[[RoomBuilder, str, str, Any], BuiltEvent]
WRITES: Final[Mapping[str, Write]] = {
    "message": lambda room, one, _, how: room.message(one, **how),
    "topic": lambda room, one, _, how: room.topic(one, f"topic {len(room.events)}", **how),
    "join": lambda room, one, _, how: room.join(one, **how),
    "leave": lambda room, one, _, how: room.leave(one, **how),
    "invite": lambda room, one, other, how: room.invite(one, other, **how),
    "kick": lambda room, one, other, how: room.kick(one, other, **how),
    "ban": lambda room, one, other, how: room.ban(one, other, **how),
    "unban": lambda room, one, other, how: room.unban(one, other, **how),
    "promote": lambda room, one, other, how: room.power_levels(one, users={other: 50}, **how),
    "lock": lambda room, one, _, how: room.power_levels(one, {"events_default": 50}, **how),
    "picture": lambda room, one, _, how: room.send(
        one, "m.room.message", {"body": "*", "url": "mxc://s1.test/x"}, **how
    ),
    "name": lambda room, one, _, how: room.name(
        one, f"name {len(room.events)}" if len(room.events) % 3 else "", **how
    ),
    "alias": lambda room, one, other, how: room.state_event(
        one,
        "m.room.canonical_alias",
        {"alias": f"#room:{other}"} if len(room.events) % 2 else {},
        **how,
    ),
    "close": lambda room, one, _, how: room.join_rules(one, "invite", **how),
    "open": lambda room, one, _, how: room.join_rules(one, "public", **how),
    "history open to all": lambda room, one, _, how: room.history_visibility(
        one, "world_readable", **how
    ),
    "history shared": lambda room, one, _, how: room.history_visibility(one, "shared", **how),
    "history for the invited": lambda room, one, _, how: room.history_visibility(
        one, "invited", **how
    ),
    "history for the joined": lambda room, one, _, how: room.history_visibility(
        one, "joined", **how
    ),
    "history for who knows": lambda room, one, _, how: room.state_event(
        one,
        "m.room.history_visibility",
        NO_VISIBILITIES[len(room.events) % len(NO_VISIBILITIES)],
        **how,
    ),
    "ask to knock": lambda room, one, _, how: room.join_rules(one, "knock", **how),
    "knock": lambda room, one, _, how: room.knock(one, **how),
}
DELIVERIES: Final = (
    "shuffled",
    "again",
    "fetched",
    "after a gap",
    "backfill",
    "junk",
    "verdicts",
    "odd",
)
ODDITIES: Final = ("fork", "redact", "refused", "depth", "damage", "clock", "relate")
RELATIONS: Final = ("m.replace", "m.thread", "m.reference", "m.annotation")
PATTERNS: Final = (
    "m.room.message",
    "m.room.member",
    "m.*",
    "*",
    "m.room.*e*",
    "*.topic",
    "m.room",
    "m.room.nam",
    "org.*",
    "*a*s*",
    "",
)
JUNK: Final = (
    b"",
    b"null",
    b'{"type":"m.room.message"}',
    b"\xff\xfe",
    b'{"type":"m.room.create","state_key":"","content":[]}',
)


EVENT_FILTERS: Final = st.builds(
    EventFilter,
    types=st.none() | st.lists(st.sampled_from(PATTERNS), max_size=3),
    not_types=st.none() | st.lists(st.sampled_from(PATTERNS), max_size=2),
    senders=st.none() | st.lists(st.sampled_from([*USERS, "@nobody:s9.test"]), max_size=3),
    not_senders=st.none() | st.lists(st.sampled_from(USERS), max_size=2),
    contains_url=st.none() | st.booleans(),
)


def deepest(version: str) -> int:
    """Return the largest depth that a PDU may claim.

    It is below 2^63 - 1, and from version 6 on the limit of canonical JSON.
    """
    return 2**63 - 2 if int(version) < 6 else 2**53 - 1


def pick(data: st.DataObject, items: Sequence[T]) -> T:
    """One of them; what a failing example prints is its place, not the whole event."""
    return items[data.draw(st.integers(0, len(items) - 1))]


def shuffled(data: st.DataObject, items: Sequence[T]) -> list[T]:
    """Any order."""
    return [items[place] for place in data.draw(st.permutations(range(len(items))))]
