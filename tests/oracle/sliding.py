"""Sliding sync (MSC4186) as the oracle answers it: by looking at every room and every event.

Positions are arrivals (the oracle's stream ordering). A connection is the list of its responses:
for each, what the client was sent of every room (`Snapshot`). A request continues from one of them.

Where the proposal leaves a choice, the oracle takes the first of these:

* A room that the client was sent, and that the user left by themselves, stays in the list.
* A forgotten room is in no list. A client that has the room gets its end once, whatever it wants.
* A room that the user was kicked or banned from is in the list only if they were ever joined.
* A timeline is sent again if its limit has grown beyond that of the last timeline with a gap before
  it, or of the first one. A client that has the whole timeline gets nothing again.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from storage import SlidingFilter
from storage.ids import EventId, RoomId, StateKey, server_name_of
from tests.oracle.memberships import server_is_in
from tests.oracle.oracle import Oracle
from tests.oracle.room_graph import State
from tests.oracle.syncing import _after_gap, _summary

MEMBER: Final = "m.room.member"
LAZY: Final = "$LAZY"
EXCLUDED: Final = "not "
"""A pattern with this before its type excludes."""
ME: Final = "$ME"
EVERYTHING: Final = 10**9
"""The timeline limit of a client that has all events."""
BUMPS: Final = (
    "m.room.create",
    "m.room.message",
    "m.room.encrypted",
    "m.sticker",
    "m.call.invite",
    "m.poll.start",
    "m.beacon_info",
)
OUTSIDE: Final = ("invite", "knock")

Patterns = frozenset[StateKey]


class Membership(NamedTuple):
    """The membership of a user in a room, its event, and the arrival that made it so.

    State resolution that removes a membership makes it a leave without an event.
    """

    name: str
    event_id: EventId | None
    position: int
    stay: int
    """The arrival that ended the last stay, or the present one for a member; 0: never joined."""

    @property
    def was_joined(self) -> bool:
        return self.stay > 0


class Listed(NamedTuple):
    """A room in the list of a user."""

    room_id: RoomId
    activity: int
    membership: Membership


def explicit(patterns: Patterns) -> Patterns:
    """Return the patterns, with one of all members if a wildcard has them."""
    if ("*", "*") in patterns and (MEMBER, LAZY) not in patterns:
        return patterns | {(MEMBER, "*")}
    return patterns


@dataclass(frozen=True)
class Wanted:
    """The room config: of a list, of a subscription, or of several combined."""

    limit: int
    patterns: Patterns

    def __or__(self, other: "Wanted") -> "Wanted":
        """``$LAZY`` of one takes no members away from a wildcard of the other."""
        included = (explicit(self.patterns) | explicit(other.patterns)) - self.excluded
        excluded = self._still_excluded(other) | other._still_excluded(self)
        limit = max(self.limit, other.limit)
        return Wanted(limit, (included - other.excluded) | excluded)

    @property
    def excluded(self) -> Patterns:
        return frozenset(pair for pair in self.patterns if pair[0].startswith(EXCLUDED))

    def _still_excluded(self, other: "Wanted") -> Patterns:
        """Return the exclusions of state that the other one does not include."""
        wanted = explicit(other.patterns) - other.excluded - {(MEMBER, LAZY)}
        return frozenset(
            (kind, key)
            for kind, key in self.excluded
            if (kind, key) in other.excluded
            or not any(
                (one == "*" or kind in (EXCLUDED + "*", EXCLUDED + one))
                and ("*" in (key, its) or key == its or its == ME)
                for one, its in wanted
            )
        )


@dataclass(frozen=True)
class Sent:
    """A room as a client was sent it: up to which arrival, and by which config."""

    upto: int
    wanted: Wanted
    membership: str
    is_dm: bool


@dataclass(frozen=True)
class Snapshot:
    """All that a client was sent, up to one response. ``upto`` None: by none."""

    upto: int | None = None
    rooms: Mapping[RoomId, Sent] = field(default_factory=dict)


@dataclass(frozen=True)
class Personal:
    """The account data that filters use."""

    direct: Collection[RoomId] = ()
    tags: Mapping[RoomId, Collection[str]] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    """The users that this one ignores, in all requests."""


@dataclass(frozen=True)
class TimelineRange:
    """The timeline of a room in one response."""

    events: list[EventId]
    limited: bool
    live: int
    """So many of its last events came after the last response."""


class SlidingOracle:
    """The responses to one user, as of what an oracle holds now."""

    def __init__(self, oracle: Oracle, user_id: str, personal: Personal) -> None:
        self.oracle, self.user_id, self.personal = oracle, user_id, personal
        self.ignored = personal.ignored
        self.now = max((held.arrival for held in oracle.held.values()), default=0)
        self._found: dict[RoomId, Membership | None] = {}

    # ----------------------------------------------------------------------------------------------
    # the list

    def membership(self, room_id: RoomId) -> Membership | None:
        if room_id not in self._found:
            self._found[room_id] = membership_of(self.oracle, room_id, self.user_id)
        return self._found[room_id]

    def listed(self, sent: Collection[RoomId]) -> list[Listed]:
        """Return the rooms of the user, latest activity first."""
        found = []
        for room_id in self.oracle.versions:
            own = self.membership(room_id)
            if own is None or self.hides(own) or self.has_forgotten(room_id):
                continue
            if room_id in sent or self._is_due(own):
                found.append(Listed(room_id, self._activity(room_id, own), own))
        return sorted(found, key=lambda one: -one.activity)

    def has_forgotten(self, room_id: RoomId) -> bool:
        return self.oracle.has_forgotten(room_id, self.user_id)

    def ended(self, sent: Mapping[RoomId, Sent]) -> list[RoomId]:
        """Return the forgotten rooms that a client has, and whose end it lacks."""
        return [
            room_id
            for room_id, before in sent.items()
            if self.has_forgotten(room_id)
            and (own := self.membership(room_id)) is not None
            and own.position > before.upto
        ]

    def _is_due(self, own: Membership) -> bool:
        if own.name in ("join", *OUTSIDE):
            return True
        if own.event_id is None:
            return False
        sender = self.oracle.get(own.event_id).event.sender
        return own.was_joined and (own.name == "ban" or sender != self.user_id)

    def _activity(self, room_id: RoomId, own: Membership) -> int:
        if own.name != "join":
            return own.position
        return max(
            held.arrival for held in self.oracle.timeline(room_id).values() if held.origin == "live"
        )

    def may_subscribe(self, room_id: RoomId, sent: Collection[RoomId]) -> bool:
        """Return whether a subscription counts: not of a user who was banned without a join."""
        own = self.membership(room_id) if room_id in self.oracle.versions else None
        if self.has_forgotten(room_id):
            return False
        if own is None or room_id in sent:
            return own is not None
        return own.event_id is not None and (own.name != "ban" or own.was_joined)

    # ----------------------------------------------------------------------------------------------
    # filters

    def passes(self, room: Listed, wanted: SlidingFilter) -> bool:
        """Return whether a room meets all conditions."""
        room_id, tags = room.room_id, self.personal.tags.get(room.room_id, ())
        kind = self.says(room_id, "m.room.create", "type")
        conditions = (
            wanted.is_dm in (None, room_id in self.personal.direct),
            wanted.is_encrypted in (None, self.is_encrypted(room_id)),
            wanted.is_invited in (None, room.membership.name == "invite"),
            wanted.room_types is None or kind in wanted.room_types,
            wanted.not_room_types is None or kind not in wanted.not_room_types,
            wanted.spaces is None or room_id in self.in_spaces(wanted.spaces),
            wanted.tags is None or bool(set(wanted.tags) & set(tags)),
            wanted.not_tags is None or not set(wanted.not_tags) & set(tags),
            wanted.room_name_like is None or self._is_named(room_id, wanted.room_name_like),
        )
        return all(conditions)

    def _is_named(self, room_id: RoomId, text: str) -> bool:
        name = self.says(room_id, "m.room.name", "name")
        return isinstance(name, str) and text.lower() in name.lower()

    def says(self, room_id: RoomId, kind: str, word: str) -> object:
        """Return what the state event of a type says, None where there is none."""
        event_id = self.state_then(room_id).get((kind, ""))
        if event_id is None or self.oracle.redacted_by(event_id) is not None:
            return None
        return self.oracle.get(event_id).event.content.get(word)

    def is_redacted(self, room_id: RoomId, kind: str) -> bool:
        """Return whether the state event of a type is redacted."""
        event_id = self.oracle.current_state(room_id).get((kind, ""))
        return event_id is not None and self.oracle.redacted_by(event_id) is not None

    def is_encrypted(self, room_id: RoomId) -> bool:
        return ("m.room.encryption", "") in self.state_then(room_id)

    def state_then(self, room_id: RoomId) -> State:
        """Return the state now, or as of when the membership ended."""
        own = self.membership(room_id)
        is_over = own is not None and own.name in ("leave", "ban")
        return self.state(room_id, own.position if own is not None and is_over else self.now)

    def in_spaces(self, spaces: Iterable[RoomId]) -> set[RoomId]:
        """Return the children of those of the spaces that the user is in."""
        found: set[RoomId] = set()
        for space in spaces:
            own = self.membership(space) if space in self.oracle.versions else None
            if own is None or own.name != "join":
                continue
            for (kind, child), event_id in self.oracle.current_state(space).items():
                if kind == "m.space.child" and self._is_child(event_id):
                    found.add(RoomId(child))
        return found

    def _is_child(self, event_id: EventId) -> bool:
        if self.oracle.redacted_by(event_id) is not None:
            return False
        return bool(self.oracle.get(event_id).event.content.get("via"))

    # ----------------------------------------------------------------------------------------------
    # a room

    def end(self, own: Membership) -> int:
        """Return the arrival up to which the user gets events of the room."""
        return self.now if own.name == "join" else own.position

    def state(self, room_id: RoomId, at: int) -> State:
        return self.oracle.current_state_at(room_id, at)

    def timeline(
        self, room_id: RoomId, after: int, upto: int, limit: int, last: int | None
    ) -> TimelineRange:
        """Return the visible live events, at most ``limit``, and whether there may be more.

        ``last``: the arrival up to which the last response reached; None: there was none, so that
        nothing is live.
        """
        oracle = self.oracle
        live = [
            event_id
            for event_id, held in oracle.timeline(room_id).items()
            if held.origin == "live" and after < held.arrival <= upto
        ]
        gaps = [place for place, event_id in enumerate(live) if _after_gap(oracle, event_id)]
        visible = oracle.visible_to_user(self.user_id, live)
        found = [one for one in live[gaps[-1] if gaps else 0 :] if one in visible]
        found = [one for one in found if not self._is_silent(one)]
        shown = found[len(found) - limit :] if len(found) > limit else found
        return TimelineRange(
            shown,
            bool(gaps) or len(found) > limit,
            0 if last is None else sum(oracle.get(one).arrival > last for one in shown),
        )

    def _is_silent(self, event_id: EventId) -> bool:
        """Return whether an event is of an ignored user, and no state."""
        event = self.oracle.get(event_id).event
        return not event.is_state and self.oracle.is_ignored(event.sender, self.ignored)

    def hides(self, own: Membership) -> bool:
        """Return whether a membership is an invite by an ignored user."""
        return (
            own.name == "invite"
            and own.event_id is not None
            and self.oracle.is_ignored(self.oracle.get(own.event_id).event.sender, self.ignored)
        )

    def bump(self, room_id: RoomId, own: Membership) -> int:
        """Return the arrival that the bump stamp stands for."""
        if own.name != "join":
            return own.position
        found = [
            held.arrival
            for held in self.oracle.timeline(room_id).values()
            if held.event.type in BUMPS and held.accepted and held.origin == "live"
        ]
        return max(found, default=0)

    def facts(self, room_id: RoomId) -> dict[str, Any]:
        """Return what a client knows of a room beside its state."""
        joined, invited, heroes = _summary(self.oracle, room_id, self.user_id)
        found = {
            "name": self.says(room_id, "m.room.name", "name") or None,
            "avatar": self.says(room_id, "m.room.avatar", "url") or None,
            "joined_count": joined,
            "invited_count": invited,
            "is_dm": room_id in self.personal.direct,
        }
        return found if found["name"] or heroes is None else {**found, "heroes": heroes}


def membership_of(oracle: Oracle, room_id: RoomId, user_id: str) -> Membership | None:
    """Return the membership now: of the current state, or of a later outlier."""
    key = (MEMBER, user_id)
    value: EventId | None = None
    name: str | None = None
    position = stay = 0
    for arrival, room, state in oracle.current_states:
        if room != room_id or state.get(key) == value:
            continue
        before, value, position = name, state.get(key), arrival
        name = oracle.membership_in(state, user_id)
        if "join" in (before, name):
            stay = arrival
    for event_id, held in oracle.held.items():
        if (
            held.outlier
            and not held.rejected
            and held.event.room_id == room_id
            and (held.event.type, held.event.state_key) == key
            and held.event.content.get("membership") != "join"
            and held.arrival > position
            and not server_is_in(oracle, room_id, server_name_of(user_id), held.arrival)
        ):
            value, position = event_id, held.arrival
            name = str(held.event.content.get("membership"))
    return Membership(name or "leave", value, position, stay) if position else None


def matches(patterns: Patterns, key: StateKey, user_id: str) -> bool:
    """Return whether a config wants a key, apart from lazily loaded members.

    With these, ("*", "*") is about other types only.
    """
    for kind, excluded in patterns:
        if kind in (EXCLUDED + "*", EXCLUDED + key[0]) and excluded in ("*", key[1]):
            return False
    lazily = key[0] == MEMBER and is_lazy(patterns)
    return any(
        kind in ("*", key[0]) and (wanted in ("*", key[1]) or (wanted == ME and key[1] == user_id))
        for kind, wanted in patterns
        if wanted != LAZY and not (lazily and (kind, wanted) == ("*", "*"))
    )


def is_lazy(patterns: Patterns) -> bool:
    return (MEMBER, LAZY) in patterns


def mentioned(oracle: Oracle, events: Sequence[EventId]) -> set[str]:
    """Return the senders of events, and the targets of their memberships."""
    found = set()
    for event_id in events:
        event = oracle.get(event_id).event
        found.add(str(event.sender))
        if event.type == MEMBER and event.state_key is not None:
            found.add(event.state_key)
    return found
