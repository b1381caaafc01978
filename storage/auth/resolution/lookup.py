"""Look-ups for resolution: events that may be missing, and the auth events that an event cites.

Where an event cites two events under one key, the first counts. Such an event is rejected, so it
should not get this far.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from storage.auth.state_keys import CREATE, POWER_LEVELS
from storage.event import Event
from storage.event.model import create_id_of
from storage.ids import EventId, StateKey

Lookup = Callable[[EventId], Event | None]
"""Look up an event by id; None where it is missing."""


class RecordingLookup:
    """A lookup that records the ids without result; ids in `absent` cannot be obtained."""

    __slots__ = ("_absent", "_events", "missing")

    def __init__(self, events: Mapping[EventId, Event], absent: AbstractSet[EventId]) -> None:
        self._events = events
        self._absent = absent
        self.missing: set[EventId] = set()

    def __call__(self, event_id: EventId) -> Event | None:
        event = self._events.get(event_id)
        if event is None and event_id not in self._absent:
            self.missing.add(event_id)
        return event


def cited(event: Event, key: StateKey, lookup: Lookup) -> Event | None:
    """Return the first auth event of an event under a key, rejected or not."""
    for event_id in event.auth_event_ids:
        auth_event = lookup(event_id)
        if auth_event is not None and auth_event.state_key == key[1] and auth_event.type == key[0]:
            return auth_event
    return None


def power_parent(event: Event, lookup: Lookup) -> EventId | None:
    """Return the id of the power levels event among the auth events of an event."""
    power_levels = cited(event, POWER_LEVELS, lookup)
    return None if power_levels is None else power_levels.event_id


def create_cited(event: Event, lookup: Lookup) -> Event | None:
    """Return the create event of an event's room.

    It is among the auth events, or (room version 12) named by the room id.
    """
    if event.room_version.create_room_id:
        return lookup(create_id_of(event.room_id))
    return cited(event, CREATE, lookup)


# --------------------------------------------------------------------------------------------------
# Split state maps into unconflicted and conflicted keys.

StateMap = Mapping[StateKey, EventId]
Conflicts = dict[StateKey, set[EventId]]


def split_conflicts(state_maps: Sequence[StateMap]) -> tuple[dict[StateKey, EventId], Conflicts]:
    """Return (unconflicted, conflicted): values that all maps share, and all other values by key.

    A key that one map lacks is conflicted, with the values that the others have, as versions 2 and
    2.1 of the algorithm define it. Version 1 differs; `storage.auth.resolution.v1` handles that. No
    maps give two empty results.
    """
    if not state_maps:
        return {}, {}
    first, *others = state_maps
    unconflicted = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    conflicted: Conflicts = {}
    for state_map in state_maps:
        for key, value in state_map.items():
            if key not in unconflicted:
                conflicted.setdefault(key, set()).add(value)
    return unconflicted, conflicted
