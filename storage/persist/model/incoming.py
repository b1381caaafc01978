"""A parsed event to store, with what the caller of `append` says about it."""

from typing import NamedTuple

from storage.event import Event
from storage.ids import EventId
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
