"""Look-ups for resolution: events that may be missing, and the auth events that an event cites.

Where an event cites two events under one key, the first counts. Such an event is rejected, so it
should not get this far.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from storage.auth.state_keys import CREATE, POWER_LEVELS
from storage.event import Event
from storage.event.references import create_id_of
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
    found = cited(event, POWER_LEVELS, lookup)
    return None if found is None else found.event_id


def create_cited(event: Event, lookup: Lookup) -> Event | None:
    """Return the create event of an event's room.

    It is among the auth events, or (room version 12) named by the room id.
    """
    if event.room_version.create_room_id:
        return lookup(create_id_of(event.room_id))
    return cited(event, CREATE, lookup)
