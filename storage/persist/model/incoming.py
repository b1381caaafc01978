"""The events to store: received ones, and those that are built here."""

from typing import NamedTuple

from storage.event import Event
from storage.ids import EventId, RoomId
from storage.persist.model.local_event import LocalEvent
from storage.persist.model.results import Origin


class IncomingEvent(NamedTuple):
    """A parsed PDU to store.

    ``state_before`` has the ids of the state before the event, as given by the caller.
    ``stripped_state`` is JSON and belongs to an out-of-band event. ``refused`` is the reason of
    the caller to refuse the event. ``soft_failed`` of an event that is stored again is the earlier
    result of the check against the current state; None: check it. ``is_partial``: a join whose
    state before it lacks members, which is stored only while it marks its room.
    """

    event: Event
    origin: Origin
    state_before: tuple[EventId, ...] | None = None
    stripped_state: str | None = None
    refused: str | None = None
    soft_failed: bool | None = None
    is_partial: bool = False

    @property
    def room_id(self) -> RoomId:
        return self.event.room_id


class Readmission(NamedTuple):
    """A refused event of a room that is to be accepted."""

    event_id: EventId
    room_id: RoomId


AnyEvent = IncomingEvent | LocalEvent | Readmission
"""An event to store: received, or to be built; or one to readmit."""
