"""Looking things up for resolution: events that may not be held, and what an event's own auth events give.

Where an event cites two events under one key (it is rejected for that, so it should not come this far) the first counts.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from storage.auth.state_keys import CREATE, POWER_LEVELS, create_id_of
from storage.event import Event
from storage.ids import EventId, StateKey

Lookup = Callable[[EventId], Event | None]
"""The event under an id, None where it is not held."""


class RecordingLookup:
    """A lookup that remembers which ids it was asked for in vain; ids in `absent` are known not to be obtainable."""

    __slots__ = ("_absent", "_events", "missing")

    def __init__(self, events: Mapping[EventId, Event], absent: AbstractSet[EventId]) -> None:
        self._events = events
        self._absent = absent
        self.missing: set[EventId] = set()

    def __call__(self, event_id: EventId) -> Event | None:
        """The event, or None and a note of the id."""
        event = self._events.get(event_id)
        if event is None and event_id not in self._absent:
            self.missing.add(event_id)
        return event


def cited(event: Event, key: StateKey, lookup: Lookup) -> Event | None:
    """The first auth event of an event under a key, rejected or not."""
    for event_id in event.auth_event_ids:
        auth_event = lookup(event_id)
        if auth_event is not None and auth_event.state_key == key[1] and auth_event.type == key[0]:
            return auth_event
    return None


def power_parent(event: Event, lookup: Lookup) -> EventId | None:
    """The id of the power levels event among the auth events of an event."""
    found = cited(event, POWER_LEVELS, lookup)
    return None if found is None else found.event_id


def create_cited(event: Event, lookup: Lookup) -> Event | None:
    """The create event that an event is under: among its auth events, or (room version 12) named by its room id."""
    if event.room_version.create_room_id:
        return lookup(create_id_of(event.room_id))
    return cited(event, CREATE, lookup)
