"""An event on its way into the store, with what its sender and its caller say of it."""

from typing import NamedTuple

from storage.event import Event
from storage.ids import EventId
from storage.persist.model.results import Origin


class IncomingEvent(NamedTuple):
    """A parsed PDU on its way in.

    ``state_before``: the ids of the state before it, given by the caller.

    ``stripped_state``: JSON, of what came out of band.
    """

    event: Event
    origin: Origin
    state_before: tuple[EventId, ...] | None = None
    stripped_state: str | None = None
