"""Mainline ordering: older power levels first.

The mainline is walked only as far as needed. An event's own chain of power levels and the mainline
are followed in turn until they meet. So the work grows with the age of the fork, not with the
room's history.

Source: room version 2, "Mainline ordering".
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from storage.auth.resolution.lookup import Lookup, power_parent
from storage.event import Event
from storage.ids import EventId

Position = int | float
"""0 for the newest power levels event of the mainline; infinity for events outside of it."""


class Mainline:
    """The chain of power levels events that ends with `newest`, and positions in it.

    `newest` None means that there is no mainline.
    """

    def __init__(
        self,
        newest: EventId | None,
        lookup: Lookup,
        parent: Callable[[Event], EventId | None] | None = None,
    ) -> None:
        """Take `parent`, which returns the power levels that an event cites.

        None means `power_parent`.
        """
        self._lookup = lookup
        self._parent_of = parent or partial(power_parent, lookup=lookup)
        self._next = newest
        self._grown = 0
        # of mainline events, and of others once they are known
        self._positions: dict[EventId, Position] = {}

    def position(self, event: Event) -> Position:
        """Return the mainline position of an event.

        It is that of the closest ancestor by power levels that is in the mainline.
        """
        walked: dict[EventId, None] = {}  # the event's chain, newest first
        ahead = self._parent_of(event)
        # the event cites no power levels, or there is no mainline
        if ahead is None or (self._next is None and not self._grown):
            return inf
        while True:
            if ahead is not None:
                if ahead in self._positions:
                    return self._remember(walked, self._positions[ahead], until=None)
                walked[ahead] = None
                ahead = self._parent(ahead)
                if ahead in walked:  # power levels that cite each other in a circle
                    ahead = None
            grown = self._grow()
            if grown is not None and grown in walked:
                return self._remember(walked, self._positions[grown], until=grown)
            if grown is None and ahead is None:
                return self._remember(walked, inf, until=None)

    def _parent(self, event_id: EventId) -> EventId | None:
        event = self._lookup(event_id)
        return None if event is None else self._parent_of(event)

    def _grow(self) -> EventId | None:
        """Walk the mainline one event further."""
        event_id = self._next
        if event_id is None:
            return None
        self._positions[event_id] = self._grown
        self._grown += 1
        parent = self._parent(event_id)
        self._next = None if parent in self._positions else parent
        return event_id

    def _remember(
        self, walked: Iterable[EventId], position: Position, *, until: EventId | None
    ) -> Position:
        for event_id in walked:
            if event_id == until:
                break
            self._positions[event_id] = position
        return position


def mainline_order(
    events: Iterable[Event], newest: EventId | None, lookup: Lookup
) -> list[EventId]:
    """Sort these events by mainline position (largest first), origin_server_ts and event id."""
    mainline = Mainline(newest, lookup)
    by_id = sorted(events, key=lambda event: event.event_id)
    return [
        event_id
        for _, _, event_id in sorted(
            (-mainline.position(e), e.origin_server_ts, e.event_id) for e in by_id
        )
    ]
