"""State resolution versions 2 and 2.1.

The power events and their auth events in the set come first, by power. All others of the full
conflicted set follow, along the mainline of the resulting power levels. Version 2.1 differs in two
points: the full conflicted set also holds the conflicted state subgraph, and the checks start from
an empty state instead of the unconflicted one.

Work is bounded by the full conflicted set, the auth events of its members, and the power levels
back to the fork.

Source: room version 2, room version 12, "State resolution".
"""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, Protocol, TypeVar

from storage.auth.auth_events import keys_needed
from storage.auth.power_levels import Level, PowerLevels
from storage.auth.resolution.lookup import Lookup, StateMap, cited, create_cited, power_parent
from storage.auth.rules import check
from storage.auth.state_keys import JOIN_RULES, MEMBER, POWER_LEVELS
from storage.errors import AuthDenied
from storage.event import Event, RoomVersion
from storage.event.model import create_id_of
from storage.ids import EventId, StateKey

# --------------------------------------------------------------------------------------------------
# Iterative auth checks: build a state by checking events one after another.
#
# Source: room version 2, "Iterative auth checks"; room version 12, where the room id names the
# create event.

MISSING: Final = "resolution.missing"
"""The rule of a refusal for which an event was missing."""

Observe = Callable[[Event, AuthDenied | None], None]
"""Called with each checked event, before it takes its key, and the refusal: None if allowed."""


class StateLookup(Protocol):
    """A state with look-up by key only."""

    def get(self, key: StateKey, /) -> EventId | None:
        """Return the id of the event under a key."""


def iterate(
    order: Iterable[EventId],
    decided: dict[StateKey, EventId],
    base: StateMap,
    lookup: Lookup,
    rejected: AbstractSet[EventId],
    *,
    observe: Observe | None = None,
) -> None:
    """Add to `decided` the keys that each event in turn is allowed to set.

    The state so far is `decided` over `base`, which is only looked up by key. An event is skipped,
    as if refused, where its auth check needs a missing event.
    """
    for event_id in order:
        event = lookup(event_id)
        if event is None or event.state_key is None:
            continue
        refused = refusal(event, auth_state_for(event, decided, base, lookup, rejected))
        if observe is not None:
            observe(event, refused)
        if refused is None:
            decided[event.key] = event_id


def auth_state_for(
    event: Event,
    decided: StateLookup,
    base: StateLookup,
    lookup: Lookup,
    rejected: AbstractSet[EventId],
) -> dict[StateKey, Event] | None:
    """Return the state for an event's auth check.

    That is the state so far, and under keys that it lacks the event's own auth events, unless
    rejected. Return None where an event that belongs there is missing, or may be among missing auth
    events.
    """
    auth_state: dict[StateKey, Event] = {}
    lacking: list[StateKey] = []
    for key in keys_needed(event):
        state_id = decided.get(key) or base.get(key)
        if state_id is None:
            lacking.append(key)
            continue
        state_event = lookup(state_id)
        if state_event is None:
            return None
        auth_state[key] = state_event
    if not lacking:
        return auth_state
    own, complete = _own_auth_state(event, lookup, rejected)
    for key in lacking:
        if key in own:
            auth_state[key] = own[key]
        elif not complete:
            return None
    return auth_state


def _own_auth_state(
    event: Event, lookup: Lookup, rejected: AbstractSet[EventId]
) -> tuple[Mapping[StateKey, Event], bool]:
    own: dict[StateKey, Event] = {}
    complete = True
    named = (create_id_of(event.room_id),) if event.room_version.create_room_id else ()
    for event_id in (*named, *event.auth_event_ids):
        auth_event = lookup(event_id)
        if auth_event is None:
            complete = False
        elif auth_event.state_key is not None and event_id not in rejected:
            own.setdefault(auth_event.key, auth_event)
    return own, complete


def allowed(event: Event, auth_state: Mapping[StateKey, Event]) -> bool:
    return refusal(event, auth_state) is None


def refusal(event: Event, auth_state: Mapping[StateKey, Event] | None) -> AuthDenied | None:
    """Return why an auth state refuses an event, None if it allows it.

    An auth state of None lacks an event, and refuses.
    """
    if auth_state is None:
        reason = "an event that its auth check needs is missing"
        return AuthDenied(reason, rule=MISSING, event_id=event.event_id)
    try:
        check(event, auth_state, event.room_version)
    except AuthDenied as refused:
        return refused
    return None


# --------------------------------------------------------------------------------------------------
# Mainline ordering: older power levels first.
#
# The mainline is walked only as far as needed. An event's own chain of power levels and the
# mainline are followed in turn until they meet. So the work grows with the age of the fork, not
# with the room's history.
#
# Source: room version 2, "Mainline ordering".

Position = int | float
"""0 for the newest power levels event of the mainline; infinity for events outside of it."""


class Mainline:
    """The chain of power levels events that ends with `newest`, and positions in it.

    `newest` None means that there is no mainline.
    """

    def __init__(
        self,
        newest: EventId | None,
        lookup: Lookup,
        parent: Callable[[Event], EventId | None] | None = None,
    ) -> None:
        """Take `parent`, which returns the power levels that an event cites.

        None means `power_parent`.
        """
        self._lookup = lookup
        self._parent_of = parent or partial(power_parent, lookup=lookup)
        self._next = newest
        self._grown = 0
        # of mainline events, and of others once they are known
        self._positions: dict[EventId, Position] = {}

    def position(self, event: Event) -> Position:
        """Return the mainline position of an event.

        It is that of the closest ancestor by power levels that is in the mainline.
        """
        walked: dict[EventId, None] = {}  # the event's chain, newest first
        ancestor = self._parent_of(event)
        # the event cites no power levels, or there is no mainline
        if ancestor is None or (self._next is None and not self._grown):
            return inf
        while True:
            if ancestor is not None:
                if ancestor in self._positions:
                    return self._remember(walked, self._positions[ancestor], until=None)
                walked[ancestor] = None
                ancestor = self._parent(ancestor)
                if ancestor in walked:  # power levels that cite each other in a circle
                    ancestor = None
            grown = self._grow()
            if grown is not None and grown in walked:
                return self._remember(walked, self._positions[grown], until=grown)
            if grown is None and ancestor is None:
                return self._remember(walked, inf, until=None)

    def _parent(self, event_id: EventId) -> EventId | None:
        event = self._lookup(event_id)
        return None if event is None else self._parent_of(event)

    def _grow(self) -> EventId | None:
        """Walk the mainline one event further."""
        event_id = self._next
        if event_id is None:
            return None
        self._positions[event_id] = self._grown
        self._grown += 1
        parent = self._parent(event_id)
        self._next = None if parent in self._positions else parent
        return event_id

    def _remember(
        self, walked: Iterable[EventId], position: Position, *, until: EventId | None
    ) -> Position:
        for event_id in walked:
            if event_id == until:
                break
            self._positions[event_id] = position
        return position


def mainline_order(
    events: Iterable[Event], newest: EventId | None, lookup: Lookup
) -> list[EventId]:
    """Sort these events by mainline position (largest first), origin_server_ts and event id."""
    mainline = Mainline(newest, lookup)
    by_id = sorted(events, key=lambda event: event.event_id)
    return [
        event_id
        for _, _, event_id in sorted(
            (-mainline.position(e), e.origin_server_ts, e.event_id) for e in by_id
        )
    ]


# --------------------------------------------------------------------------------------------------
# Reverse topological power ordering: the order of the checks of power events.
#
# Source: room version 2, "Reverse topological power ordering".

T = TypeVar("T")

PowerKey = tuple[Level, int, EventId]
Steps = Generator[bool, None, T]
"""Work in small steps: yields after each whether something has to be loaded before the next."""


def sender_level(event: Event, lookup: Lookup) -> Level:
    """Return the level of an event's sender by the event's own auth events.

    Without a power levels event among them the creator has 100 and everybody else 0. Creators of
    room version 12 are above every level either way.
    """
    levels = PowerLevels(
        cited(event, POWER_LEVELS, lookup), create_cited(event, lookup), event.room_version
    )
    return levels.user(event.sender)


def power_key(event: Event, lookup: Lookup) -> PowerKey:
    """Return the sort key between events that do not cite each other; the smaller goes first."""
    return (-sender_level(event, lookup), event.origin_server_ts, event.event_id)


def reverse_topological_power_order(
    event_ids: Collection[EventId], lookup: Lookup
) -> list[EventId]:
    """Sort these events, each after those of them that it cites, and else by `power_key`.

    Missing events are left out.
    """
    events = {
        event.event_id: event for event_id in event_ids if (event := lookup(event_id)) is not None
    }
    order: list[EventId] = []
    for _ in in_power_order(
        {event_id: power_key(event, lookup) for event_id, event in events.items()}, events, order
    ):
        pass
    return order


def in_power_order(
    keys: Mapping[EventId, PowerKey], events: Mapping[EventId, Event], order: list[EventId]
) -> Steps[bool]:
    """Append the events that have keys to `order`, yielding after each.

    Return whether events cite each other in a circle.

    Kahn's algorithm over the edges between the events given. Where nothing is free because of a
    circle, the smallest of the remaining events goes next.
    """
    open_citations: dict[EventId, int] = {}
    citing: dict[EventId, list[EventId]] = {event_id: [] for event_id in keys}
    for event_id in keys:
        inside = {cited_id for cited_id in events[event_id].auth_event_ids if cited_id in keys}
        open_citations[event_id] = len(inside)
        for cited_id in inside:
            citing[cited_id].append(event_id)
        yield False
    free = [keys[event_id] for event_id, count in open_citations.items() if count == 0]
    heapify(free)
    by_key = iter(sorted(keys.values()))
    is_circular = False
    while open_citations:
        is_circular = is_circular or not free
        event_id = (heappop(free) if free else next(by_key))[2]
        if open_citations.pop(event_id, None) is None:
            continue
        order.append(event_id)
        for later in citing[event_id]:
            if later in open_citations:
                open_citations[later] -= 1
                if open_citations[later] == 0:
                    heappush(free, keys[later])
        yield False
    return is_circular


@dataclass(frozen=True, slots=True)
class ConflictedEvents:
    """The input of the two phases.

    `full` is the full conflicted set. `walk` holds at least every event on a path of auth events
    from one event of `full` to another. If that is not known it is None, and whole chains are
    walked.
    """

    full: AbstractSet[EventId]
    walk: AbstractSet[EventId] | None
    base: StateMap


def is_power_event(event: Event) -> bool:
    """Return whether it is a power event.

    Power levels, join rules, and memberships that remove somebody else from the room.
    """
    if event.state_key is None:
        return False
    if event.type in (POWER_LEVELS[0], JOIN_RULES[0]):
        return True
    return (
        event.type == MEMBER
        and event.sender != event.state_key
        and event.content.get("membership") in ("leave", "ban")
    )


def power_phase_events(conflict: ConflictedEvents, lookup: Lookup) -> set[EventId]:
    """Return X: the power events of the full conflicted set, and their chains within the set."""
    power_events = {
        event_id
        for event_id in conflict.full
        if (event := lookup(event_id)) is not None and is_power_event(event)
    }
    seen = set(power_events)
    waiting = list(power_events)
    while waiting:
        event = lookup(waiting.pop())
        for cited_id in () if event is None else event.auth_event_ids:
            if cited_id not in seen and (conflict.walk is None or cited_id in conflict.walk):
                seen.add(cited_id)
                waiting.append(cited_id)
    return {event_id for event_id in seen if event_id in conflict.full}


def power_phase(
    conflict: ConflictedEvents,
    lookup: Lookup,
    rejected: AbstractSet[EventId],
    observe: Observe | None = None,
) -> tuple[dict[StateKey, EventId], set[EventId]]:
    """Run steps 1 and 2: return the values that the power events decide, and the checked events."""
    checked = power_phase_events(conflict, lookup)
    decided: dict[StateKey, EventId] = {}
    order = reverse_topological_power_order(checked, lookup)
    iterate(order, decided, conflict.base, lookup, rejected, observe=observe)
    return decided, checked


def remaining_order(
    conflict: ConflictedEvents, decided: StateMap, checked: AbstractSet[EventId], lookup: Lookup
) -> list[EventId]:
    """Return the order of step 3.

    It has all other events of the full conflicted set, by the mainline of the decided power levels.
    """
    remaining = [
        event
        for event_id in conflict.full
        if event_id not in checked and (event := lookup(event_id)) is not None
    ]
    newest = decided.get(POWER_LEVELS) or conflict.base.get(POWER_LEVELS)
    return mainline_order(remaining, newest, lookup)


def resolve_v2(
    conflict: ConflictedEvents,
    unconflicted: StateMap,
    lookup: Lookup,
    rejected: AbstractSet[EventId],
    observe: Observe | None = None,
) -> dict[StateKey, EventId]:
    """Run steps 1 to 5: return the values of the keys outside the unconflicted state."""
    decided, checked = power_phase(conflict, lookup, rejected, observe)
    order = remaining_order(conflict, decided, checked, lookup)
    iterate(order, decided, conflict.base, lookup, rejected, observe=observe)
    return {key: event_id for key, event_id in decided.items() if unconflicted.get(key) is None}


def conflict_of(
    version: RoomVersion,
    unconflicted: StateMap,
    conflicted: Mapping[StateKey, AbstractSet[EventId]],
    auth_difference: AbstractSet[EventId],
    subgraph: AbstractSet[EventId] | None,
) -> ConflictedEvents:
    """Return the full conflicted set, and the state that the checks start from."""
    full = set(auth_difference).union(*conflicted.values())
    walk = None if subgraph is None else full | subgraph
    if version.state_resolution == "v2":
        return ConflictedEvents(full, walk, unconflicted)
    return ConflictedEvents(full if walk is None else walk, walk, {})


# --------------------------------------------------------------------------------------------------
# Sets in the graph of auth events, over an in-memory map.
#
# Walks are iterative and visit each event once. So neither depth nor a cycle (possible where
# senders choose event ids, in room versions 1 and 2) stops them. A named event that is not in the
# map belongs to a chain and ends it.
#
# Source: room version 2, "Auth chain", "Auth difference"; room version 12, "Conflicted state
# subgraph".

Events = Mapping[EventId, Event]

_NOTHING: frozenset[EventId] = frozenset()


def auth_chain(
    event_ids: Iterable[EventId], events: Events, *, stop_at: AbstractSet[EventId] = _NOTHING
) -> set[EventId]:
    """Return all ancestors of these events by `auth_events`.

    The events themselves are included only where they are ancestors of others. The walk does not
    return, or pass, events in `stop_at`.
    """
    chain: set[EventId] = set()
    waiting = list(event_ids)
    while waiting:
        event = events.get(waiting.pop())
        for named in () if event is None else event.auth_event_ids:
            if named not in chain and named not in stop_at:
                chain.add(named)
                waiting.append(named)
    return chain


def auth_difference(state_sets: Iterable[Collection[EventId]], events: Events) -> set[EventId]:
    """Return the events that are in the auth chains of some of these states, but not of all.

    Each state is given by the ids of its events. The part that the states share is walked once.
    """
    states: list[set[EventId]] = [set(state) for state in state_sets]
    if not states:
        return set()
    shared = states[0].intersection(*states[1:])
    base = auth_chain(shared, events)
    chains = [auth_chain(state - shared, events, stop_at=base) for state in states]
    return chains[0].union(*chains[1:]) - chains[0].intersection(*chains[1:])


def conflicted_subgraph(conflicted: Collection[EventId], events: Events) -> set[EventId]:
    """Return the events on all `auth_events` paths between conflicted events, both included."""
    starts = set(conflicted)
    ancestors = auth_chain(starts, events)
    citing: dict[EventId, list[EventId]] = {}
    for event_id in ancestors | starts:
        event = events.get(event_id)
        for named in () if event is None else event.auth_event_ids:
            citing.setdefault(named, []).append(event_id)
    descendants: set[EventId] = set()
    waiting = list(starts)
    while waiting:
        for event_id in citing.get(waiting.pop(), ()):
            if event_id not in descendants:
                descendants.add(event_id)
                waiting.append(event_id)
    return (descendants & ancestors) | (descendants & starts) | (ancestors & starts)
