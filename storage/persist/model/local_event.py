"""An event of a local user that the plan builds, because only the plan knows its parents."""

from dataclasses import dataclass, field
from typing import NamedTuple

from signedjson.types import SigningKey

from storage.event import Event
from storage.event.building import EventTemplate
from storage.ids import EventId, RoomId, ServerName
from storage.persist.model.transaction import Transaction


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
