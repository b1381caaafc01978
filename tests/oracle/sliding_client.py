"""A client of sliding sync that applies responses and knows nothing else."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from storage.ids import EventId, RoomId, StateKey
from tests.oracle.sliding import MEMBER, Patterns, explicit, is_lazy, matches


@dataclass(frozen=True)
class FoundRoom:
    """A room of a response, as plain values. ``facts`` are those that the response has."""

    initial: bool
    expanded: bool
    limited: bool
    membership: str | None
    timeline: list[EventId]
    num_live: int
    bump: int | None
    state: Mapping[StateKey, EventId]
    removed: Collection[StateKey]
    facts: Mapping[str, Any]
    stripped: list[Any]
    lists: frozenset[str]

    @property
    def has_news(self) -> bool:
        told = (self.timeline, self.state, self.removed, self.facts, self.stripped)
        return self.initial or self.limited or any(map(bool, told))


@dataclass(frozen=True)
class FoundSync:
    """A response, as plain values."""

    pos: str
    counts: Mapping[str, int]
    rooms: Mapping[RoomId, FoundRoom]


@dataclass
class RoomCopy:
    """A room as the client has it: the timeline has no hole that it does not know of."""

    state: dict[StateKey, EventId] = field(default_factory=dict)
    timeline: list[EventId] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    membership: str | None = None
    lazily: set[StateKey] = field(default_factory=set)
    """The members that were loaded lazily."""
    follows: bool = True
    """The responses have all changes of members."""
    is_complete: bool = False
    """It has all members, because it once wanted them, and follows them since then."""
    outdated: set[StateKey] = field(default_factory=set)
    """Members that changed, perhaps, while the responses did not have all changes."""

    def hear(self, told: FoundRoom, patterns: Patterns, user_id: str) -> None:
        """Apply what is returned. Raise AssertionError if an event is returned twice."""
        if told.initial:
            self.state, self.timeline, self.facts = {}, [], {"is_dm": False}
            self.lazily, self.is_complete = set(), (MEMBER, "*") in explicit(patterns)
        elif told.limited and is_lazy(patterns) and (MEMBER, "*") not in patterns:
            self.is_complete = False
            members = (key for key in self.state if key[0] == MEMBER and key[1] != user_id)
            self.lazily |= {key for key in members if not matches(patterns, key, user_id)}
            self.forget_members()
        if told.expanded or told.limited:
            self.timeline = []
        assert not set(self.timeline) & set(told.timeline), "told twice"
        self.timeline += told.timeline
        for key in told.state.keys() - (self.state.keys() - self.lazily):
            is_loaded = key[0] == MEMBER and not matches(patterns, key, user_id)
            is_loaded = is_loaded and not self.is_complete
            (self.lazily.add if is_loaded else self.lazily.discard)(key)
        self.state.update(told.state)
        self.outdated = self.outdated - told.state.keys()
        for key in told.removed:
            self.state.pop(key, None)
        self.facts.update(told.facts)
        self.membership = told.membership or self.membership

    def want(self, patterns: Patterns, user_id: str) -> None:
        """Apply the config of a request.

        A client forgets lazily loaded members when it loads none any more. If it begins to load
        lazily, and did not follow the members meanwhile, those that it has may be outdated.
        """
        if not is_lazy(patterns) or (MEMBER, "*") in patterns:
            self.forget_members()
            self.follows, self.outdated = (MEMBER, "*") in explicit(patterns), set()
            self.is_complete = self.follows
        elif not self.follows:
            self.outdated = {key for key in self.state if key[0] == MEMBER and key[1] != user_id}
            self.follows = True

    def forget_members(self) -> None:
        """Forget the members that were loaded lazily."""
        self.state = {key: value for key, value in self.state.items() if key not in self.lazily}
        self.lazily = set()

    def copy(self) -> "RoomCopy":
        return replace(
            self,
            state=dict(self.state),
            timeline=list(self.timeline),
            facts=dict(self.facts),
            lazily=set(self.lazily),
        )


@dataclass
class ModelClient:
    rooms: dict[RoomId, RoomCopy] = field(default_factory=dict)

    def after(
        self, found: FoundSync, patterns: Mapping[RoomId, Patterns], user_id: str
    ) -> "ModelClient":
        """Return the client after a response. This one stays as it is, for a replay.

        ``patterns``: of the rooms in the request.
        """
        rooms = dict(self.rooms)
        for room_id in patterns.keys() & rooms.keys():
            rooms[room_id] = rooms[room_id].copy()
            rooms[room_id].want(patterns[room_id], user_id)
        for room_id, told in found.rooms.items():
            wanted = patterns.get(room_id, frozenset())
            rooms[room_id] = rooms[room_id].copy() if room_id in rooms else RoomCopy()
            rooms[room_id].want(wanted, user_id)
            rooms[room_id].hear(told, wanted, user_id)
        return ModelClient(rooms)
