"""Iterative auth checks: build a state by checking events one after another.

Source: room version 2, "Iterative auth checks"; room version 12, where the room id names the create
event.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Protocol

from storage.auth.auth_event_selection import keys_needed
from storage.auth.resolution.conflicts import StateMap
from storage.auth.resolution.lookup import Lookup
from storage.auth.rules import check
from storage.errors import AuthDenied
from storage.event import Event
from storage.event.references import create_id_of
from storage.ids import EventId, StateKey

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
        found = lookup(state_id)
        if found is None:
            return None
        auth_state[key] = found
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
