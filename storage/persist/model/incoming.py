"""The events to store: received ones, and those that are built here."""

from dataclasses import dataclass, field
from typing import NamedTuple

from signedjson.types import SigningKey

from storage.event import Event
from storage.event.building import EventTemplate
from storage.ids import EventId, RoomId, ServerName
from storage.persist.model.results import Origin, Transaction

# --------------------------------------------------------------------------------------------------
# An event of a local user that the plan builds, because only the plan knows its parents.


class Signer(NamedTuple):
    """The server that signs, and its key."""

    server_name: ServerName
    key: SigningKey


@dataclass(slots=True, eq=False)
class LocalEvent:
    """A request to build, sign and store an event in a room.

    ``built`` is the event of the last plan, with the parents and auth events that it has: a plan
    that only lacked data is made again with the same ones.
    """

    template: EventTemplate
    signer: Signer
    room_id: RoomId
    transaction: Transaction | None = None
    built_on: tuple[tuple[EventId, ...], tuple[EventId, ...]] = ((), ())
    built: Event | None = field(default=None)


class IncomingEvent(NamedTuple):
    """A parsed PDU to store.

    ``state_before`` has the ids of the state before the event, as given by the caller.
    ``stripped_state`` is JSON and belongs to an out-of-band event. ``refused`` is the reason of
    the caller to refuse the event. ``rejected`` of an event that is planned again is the reason of
    its rejection where its auth events are gone since; None: check it. ``is_partial``: a join whose
    state before it lacks members, which is stored only while it marks its room.
    """

    event: Event
    origin: Origin
    state_before: tuple[EventId, ...] | None = None
    stripped_state: str | None = None
    refused: str | None = None
    rejected: str | None = None
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
