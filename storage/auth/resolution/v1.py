"""State resolution version 1.

Power levels are resolved first, then join rules, then memberships. The events under one of these
keys are taken from the lowest depth up; each replaces the one before if the state with that one
allows it. For any other key the deepest allowed event wins. Where none is allowed the lowest stays
(the specification is silent; Synapse and gomatrixserverlib agree). Keys of one phase use only the
results of earlier phases, so the order of keys does not matter.

Source: room version 1, "State resolution".
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from hashlib import sha1
from typing import NamedTuple

from storage.auth.auth_events import keys_needed
from storage.auth.resolution.lookup import Lookup, StateMap
from storage.auth.resolution.v2 import Observe, refusal
from storage.auth.state_keys import JOIN_RULES, MEMBER, POWER_LEVELS
from storage.event import Event
from storage.ids import EventId, StateKey

_PHASES = (POWER_LEVELS[0], JOIN_RULES[0], MEMBER)


def resolve_v1(
    unconflicted: StateMap,
    conflicted: Mapping[StateKey, AbstractSet[EventId]],
    lookup: Lookup,
    observe: Observe | None = None,
) -> dict[StateKey, EventId]:
    """Resolve the conflicted keys.

    A key with a single value is no conflict in this version and keeps it. `observe` is called for
    each checked event: the first event of a chain is not checked.
    """
    decided = {key: event_id for key, (event_id, *others) in conflicted.items() if not others}
    ordered = {
        key: _ordered(event_ids, lookup)
        for key, event_ids in conflicted.items()
        if len(event_ids) > 1
    }
    left = {key: events for key, events in ordered.items() if events}
    for phase in _PHASES:
        keys = [key for key in left if key[0] == phase]
        decided |= {
            key: _last_of_chain(
                key, left.pop(key), StateSoFar(decided, unconflicted, lookup, observe)
            )
            for key in keys
        }
    return decided | {
        key: _deepest_allowed(events, StateSoFar(decided, unconflicted, lookup, observe))
        for key, events in left.items()
    }


class StateSoFar(NamedTuple):
    """R of the specification, as ids and a lookup of the events."""

    decided: StateMap
    unconflicted: StateMap
    lookup: Lookup
    observe: Observe | None = None

    def allows(self, event: Event, placed: Mapping[StateKey, Event]) -> bool:
        """Return whether this state, with `placed` put into it, allows the event.

        False where an event that the check needs is missing.
        """
        refused = refusal(event, self._auth_state(event, placed))
        if self.observe is not None:
            self.observe(event, refused)
        return refused is None

    def _auth_state(
        self, event: Event, placed: Mapping[StateKey, Event]
    ) -> dict[StateKey, Event] | None:
        """Return the state for an event's auth check. None: an event of it is missing."""
        auth_state: dict[StateKey, Event] = {}
        for key in keys_needed(event):
            state_id = self.decided.get(key) or self.unconflicted.get(key)
            state_event = placed.get(key) or (None if state_id is None else self.lookup(state_id))
            if state_event is not None:
                auth_state[key] = state_event
            elif state_id is not None:
                return None
        return auth_state


def _ordered(event_ids: Iterable[EventId], lookup: Lookup) -> list[Event]:
    """Sort the stored events by depth, and by descending hash where depths are equal."""
    events = [event for event_id in event_ids if (event := lookup(event_id)) is not None]
    by_hash = sorted(events, key=lambda event: sha1(event.event_id.encode()).digest(), reverse=True)  # noqa: S324  the protocol's order
    return sorted(by_hash, key=lambda event: event.depth)


def _last_of_chain(key: StateKey, events: list[Event], state: StateSoFar) -> EventId:
    accepted = events[0]
    for event in events[1:]:
        if not state.allows(event, {key: accepted}):
            break
        accepted = event
    return accepted.event_id


def _deepest_allowed(events: list[Event], state: StateSoFar) -> EventId:
    allowed = (event.event_id for event in reversed(events) if state.allows(event, {}))
    return next(allowed, events[0].event_id)
