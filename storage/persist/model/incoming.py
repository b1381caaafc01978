"""The events to store: received ones, and those that are built here."""

from typing import NamedTuple

from storage.event import Event
from storage.ids import EventId, RoomId
from storage.persist.model.local_event import LocalEvent
from storage.persist.model.results import Origin


class IncomingEvent(NamedTuple):
    """A parsed PDU to store.

    ``state_before`` has the ids of the state before the event, as given by the caller.
    ``stripped_state`` is JSON and belongs to an out-of-band event.
    """

    event: Event
    origin: Origin
    state_before: tuple[EventId, ...] | None = None
    stripped_state: str | None = None

    @property
    def room_id(self) -> RoomId:
        """Return the room of the event."""
        return self.event.room_id


AnyEvent = IncomingEvent | LocalEvent
"""An event to store: received, or to be built."""
