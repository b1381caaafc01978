"""The chain cover of the auth graph, and auth checks that were done before.

A view reads through to the caches of the process, and collects what the batch adds and changes.
"""

from collections.abc import Iterable

from storage.graph.chains import Chain, ChainEntry, ChainPosition, Closure, extended
from storage.persist.model.caches import WriterCaches
from storage.persist.model.event_view import EventView
from storage.persist.model.missing_data import MissingData, ensure
from storage.persist.model.rows import AuthorisedBefore, CheckedLike


class AuthGraphView:
    """The chain cover of the auth graph, and auth checks that were done before."""

    def __init__(self, caches: WriterCaches, events: EventView) -> None:
        self.caches = caches
        self.events = events
        self.places: dict[int, ChainPosition] = {}
        self.chains: dict[int, Chain] = {}
        self.closures: dict[int, Closure] = {}
        self.loose: set[int] = set()  # events without a chain position in the database
        self.allowed: dict[CheckedLike, AuthorisedBefore] = {}
        self.new_places: dict[int, ChainEntry] = {}

    def place(self, event_nid: int) -> ChainPosition:
        """Return the chain position of an accepted state event."""
        place = self.places.get(event_nid) or self.caches.places.row(event_nid)
        if place is None:
            raise MissingData("places", (event_nid,))
        return place

    def chain(self, chain_nid: int) -> Chain:
        chain = self.chains.get(chain_nid)
        if chain is not None:
            return chain
        numbers = self.caches.chains.get(chain_nid)
        if numbers is None:
            raise MissingData("chains", (chain_nid,))
        return Chain.from_numbers(numbers)

    def ensure_places(self, event_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the chain positions of these events are loaded."""
        ensure("places", event_nids, self.places, self.caches.places)

    def ensure_standing(self, event_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the chain positions and rows of these events are loaded.

        They are the starting points of a walk over auth chains.
        """
        unknown = [
            nid
            for nid in event_nids
            if (nid not in self.places and nid not in self.caches.places)
            or self.events.known_row(nid) is None
        ]
        if unknown:
            raise MissingData("standing", unknown)

    def add_place(self, event_nid: int, entry: ChainEntry) -> None:
        """Set the chain position of a new event."""
        self.new_places[event_nid] = entry
        self.places[event_nid] = entry.place
        chain_nid = entry.place.chain_nid
        known = None if entry.place.sequence_number == 1 else self.chain(chain_nid)
        self.chains[chain_nid] = extended(known, entry)
