"""What planning reads: caches of committed rows, overlaid by what the batch in hand has added.

Planning is synchronous and touches no database. Where it lacks something it raises `MissingData`,
which names what is missing; the driver loads it (`storage.persist.load.by_kind`) and asks again.
Nothing is changed before everything that a decision needs is there, so asking again is harmless.
Cached rows are immutable, or guarded by `rooms.write_version`: a plan made from a stale cache is
refused when it is written, and the rooms concerned are forgotten. What was thrown away by somebody
else is told in the stream "caches" (`Removed`); until that is here, `rooms.removals` has a write
look whether all that it builds on is there still.
"""

from collections.abc import Hashable, Iterable
from typing import Any

from immutables import Map

from storage.errors import StorageCorrupt
from storage.event import Event
from storage.graph.chains import Chain, ChainPosition, Closure
from storage.persist.model.caches import WriterCaches
from storage.persist.model.missing_data import MissingData
from storage.persist.model.resolution_records import ResolutionRecord
from storage.persist.model.rows import (
    UNSEEN,
    AudienceRow,
    AuthorisedBefore,
    Counts,
    EventRow,
    MissingRow,
    PastRow,
    RoomRow,
    VisibilityRow,
)
from storage.persist.model.time_slice import TimeSlice
from storage.state.groups import Group
from storage.visibility import past


class CacheView:
    """The overlay of one batch over the caches.

    What is added here reaches the caches only after the commit.
    """

    def __init__(self, caches: WriterCaches) -> None:
        self.caches = caches
        self.rows: dict[str, EventRow | None] = {}
        self.row_ids: dict[int, str] = {}  # "" where no event has the nid
        self.missing: dict[str, MissingRow | None] = {}
        self.gap_ids: dict[int, str] = {}
        self.waiting: dict[str, tuple[int, ...]] = {}
        self.pending: EventRow | None = None
        self.pending_event: Event | None = None
        self.events: dict[int, Event] = {}
        self.groups: dict[int, Group] = {}
        self.visibility: dict[tuple[int, int], VisibilityRow] = {}
        self.past: dict[tuple[int, int], dict[int, PastRow]] = {}  # by first audience
        self.audiences: dict[tuple[int, int], AudienceRow] = {}
        self.counts: dict[int, Map[int, Counts]] = {}
        self.places: dict[int, ChainPosition] = {}
        self.chains: dict[int, Chain] = {}
        self.closures: dict[int, Closure] = {}
        self.loose: set[int] = set()  # the database has no place for these
        self.allowed: dict[tuple[object, ...], AuthorisedBefore] = {}
        self.rooms: dict[str, RoomRow | None] = {}
        self.types: dict[str, int | None] = {}
        self.type_names: dict[int, str] = {}
        self.state_keys: dict[tuple[int, str], int | None] = {}
        self.state_key_names: dict[int, tuple[int, str]] = {}
        self.principals: dict[str, int | None] = {}
        self.newcomers: set[int] = set()  # principals that have no row anywhere yet
        self.fresh_rooms: set[int] = set()  # rooms that have no row of any kind yet
        self.answers: dict[Hashable, Any] = {}
        self.records: dict[int, list[ResolutionRecord]] = {}
        self.time_slice = TimeSlice()
        self.resolving_seconds: dict[str, float] = {}
        """By room, the seconds of processor time that state resolutions took."""

    def row(self, event_id: str) -> EventRow | None:
        """The row of an event, or None if it is not held."""
        if self.pending is not None and self.pending.event_id == event_id:
            return self.pending
        if event_id in self.rows:
            return self.rows[event_id]
        row = self.caches.rows.get(event_id)
        if row is None:
            raise MissingData("event_ids", (event_id,))
        return row

    def find_row(self, event_nid: int) -> EventRow | None:
        """The row of an event by nid, or None if it is only referred to, and not held."""
        if self.pending is not None and self.pending.event_nid == event_nid:
            return self.pending
        event_id = self.row_ids.get(event_nid)
        if event_id is None:
            event_id = self.caches.row_ids.get(event_nid)
        if event_id == "":
            return None
        row = (
            None if event_id is None else self.rows.get(event_id) or self.caches.rows.get(event_id)
        )
        if row is None:
            raise MissingData("event_nids", (event_nid,))
        return row

    def known_row(self, event_nid: int) -> EventRow | None:
        """The row of an event if it is at hand; None says nothing about the event."""
        if self.pending is not None and self.pending.event_nid == event_nid:
            return self.pending
        event_id = self.row_ids.get(event_nid) or self.caches.row_ids.get(event_nid)
        return (
            None if event_id is None else self.rows.get(event_id) or self.caches.rows.get(event_id)
        )

    def sender_of(self, row: EventRow) -> str:
        """Who sent an event."""
        name = self.caches.names.principal_names.get(row.sender_nid)
        return name if name is not None else self.events_of((row.event_nid,))[row.event_nid].sender

    def row_of(self, event_nid: int) -> EventRow:
        """The row of an event that must be held; `StorageCorrupt` if it is not."""
        row = self.find_row(event_nid)
        if row is None:
            raise StorageCorrupt("an event that a row refers to is not held", event_nid=event_nid)
        return row

    def missing_row(self, event_id: str) -> MissingRow | None:
        """What waits for an event that is not held in the timeline, or None if nothing does."""
        if event_id in self.missing:
            return self.missing[event_id]
        row = self.caches.missing.get(event_id)
        if row is None:
            raise MissingData("event_ids", (event_id,))
        return row

    def gap(self, event_nid: int) -> MissingRow | None:
        """The gap that a nid stands for; None if the event has arrived."""
        if event_nid not in self.gap_ids:
            raise MissingData("gap_nids", (event_nid,))
        return self.missing_row(self.gap_ids[event_nid])

    def waiting_for(self, event_id: str) -> tuple[int, ...]:
        """The nids of the redactions that wait for an event."""
        if event_id not in self.waiting:
            raise MissingData("event_ids", (event_id,))
        return self.waiting[event_id]

    def events_of(self, event_nids: Iterable[int]) -> dict[int, Event]:
        """Events with their content, by nid. All must be held."""
        found: dict[int, Event] = {}
        unknown: list[int] = []
        for nid in event_nids:
            event = self.events.get(nid) or self.caches.events.get(nid)
            if event is None and self.pending is not None and self.pending.event_nid == nid:
                event = self.pending_event
            if event is None:
                unknown.append(nid)
            else:
                found[nid] = event
        if unknown:
            raise MissingData("events", unknown)
        return found

    def at_hand(self, event_id: str) -> tuple[EventRow, Event] | None:
        """The row of an event and its content, if both are in memory; None says nothing about the event."""
        if self.pending is not None and self.pending.event_id == event_id:
            return None if self.pending_event is None else (self.pending, self.pending_event)
        row = self.rows.get(event_id) or self.caches.rows.get(event_id)
        event = (
            None
            if row is None
            else self.events.get(row.event_nid) or self.caches.events.get(row.event_nid)
        )
        return None if row is None or event is None else (row, event)

    def group(self, state_group: int) -> Group:
        """A state group with its whole state."""
        group = self.groups.get(state_group) or self.caches.groups.get(state_group)
        if group is None:
            raise MissingData("groups", (state_group,))
        return group

    def counts_of(self, state_group: int) -> Map[int, Counts]:
        """By principal, the users in a state, as far as they are known."""
        return self.counts.get(state_group) or self.caches.counts.get(state_group) or Map()

    def visible(self, room_nid: int, principal_nid: int) -> VisibilityRow:
        """The visibility row of a principal; `UNSEEN` if it has none."""
        key = (room_nid, principal_nid)
        row = self.visibility.get(key) or self.caches.visibility.get(key)
        if row is None:
            if principal_nid in self.newcomers or room_nid in self.fresh_rooms:
                return UNSEEN
            raise MissingData("visibility", (key,))
        return row

    def ensure_audiences(self, room_nid: int, audiences: Iterable[int]) -> None:
        """Have the rows of these audiences."""
        self._ensure(
            "audiences",
            ((room_nid, number) for number in audiences),
            self.audiences,
            self.caches.audiences,
        )

    def past_row(self, room_nid: int, principal_nid: int, number: int) -> PastRow:
        """The row of a principal that tells of an audience below the first one of its row of `visibility`."""
        for row in self.past.get((room_nid, principal_nid), {}).values():
            if row.tells_of(number):
                return row
        raise MissingData("past", ((room_nid, principal_nid, number),))

    def cuts(self, row: VisibilityRow) -> bool:
        """Whether the older ranges of a row go to rows of `past_visibility`: it has too many, and no code is left that does not know these."""
        if past.boundary(row.audiences, row.invited_audiences) is None:
            return False
        return self.caches.has_past or bool(self.answer(("has_past",)))

    def audience(self, room_nid: int, number: int) -> AudienceRow:
        """The row of an audience in use."""
        key = (room_nid, number)
        row = self.audiences.get(key) or self.caches.audiences.get(key)
        if row is None:
            raise MissingData("audiences", (key,))
        return row

    def place(self, event_nid: int) -> ChainPosition:
        """Where an accepted state event stands in the chain cover."""
        place = self.places.get(event_nid) or self.caches.places.get(event_nid)
        if place is None:
            raise MissingData("places", (event_nid,))
        return place

    def chain(self, chain_nid: int) -> Chain:
        """A chain of the cover."""
        chain = self.chains.get(chain_nid) or self.caches.chains.get(chain_nid)
        if chain is None:
            raise MissingData("chains", (chain_nid,))
        return chain

    def room(self, room_id: str) -> RoomRow | None:
        """The row of a room, or None if the store does not know it."""
        if room_id in self.rooms:
            return self.rooms[room_id]
        row = self.caches.rooms.get(room_id)
        if row is None:
            raise MissingData("rooms", (room_id,))
        return row

    def find_type(self, name: str) -> int | None:
        """The nid of an event type, or None if it has none yet."""
        nid = self.caches.names.types.get(name) or self.types.get(name)
        if nid is None and name not in self.types:
            raise MissingData("types", (name,))
        return nid

    def type_name(self, type_nid: int) -> str:
        """The event type behind a nid."""
        name = self.caches.names.type_names.get(type_nid) or self.type_names.get(type_nid)
        if name is None:
            raise MissingData("type_names", (type_nid,))
        return name

    def find_state_key(self, type_nid: int, state_key: str) -> int | None:
        """The nid of a state key, or None if it has none yet."""
        key = (type_nid, state_key)
        nid = self.caches.names.state_keys.get(key) or self.state_keys.get(key)
        if nid is None and key not in self.state_keys:
            raise MissingData("state_keys", (key,))
        return nid

    def state_key_name(self, state_key_nid: int) -> tuple[int, str]:
        """Return the type nid and the state key behind a nid.

        From now on the change set knows them: the caches may forget before it is written.
        """
        name = self.state_key_names.get(state_key_nid)
        if name is None:
            name = self.caches.names.state_key_names.get(state_key_nid)
            if name is None:
                raise MissingData("state_key_names", (state_key_nid,))
            self.state_key_names[state_key_nid] = name
        return name

    def find_principal(self, name: str) -> int | None:
        """The nid of a user or server, or None if it has none yet."""
        nid = self.caches.names.principals.get(name) or self.principals.get(name)
        if nid is None and name not in self.principals:
            raise MissingData("principals", (name,))
        return nid

    def records_of(self, room_nid: int) -> list[ResolutionRecord]:
        """What is remembered of a room's resolutions; from here on it is this change set's alone."""
        known = self.records.get(room_nid)
        if known is None:
            known = self.records[room_nid] = self.caches.records.pop(room_nid, [])
        return known

    # ----------------------------------------------------------------------------------------------
    # many at once

    def ensure_ids(self, event_ids: Iterable[str]) -> None:
        """Know of each of these events whether it is held."""
        pending = self.pending.event_id if self.pending is not None else None
        self._ensure(
            "event_ids", (one for one in event_ids if one != pending), self.rows, self.caches.rows
        )

    def ensure_rows(self, event_nids: Iterable[int]) -> None:
        """Have the rows of these events."""
        pending = self.pending.event_nid if self.pending is not None else None
        self._ensure(
            "event_nids",
            (nid for nid in event_nids if nid != pending),
            self.row_ids,
            self.caches.row_ids,
        )

    def ensure_state_key_names(self, state_key_nids: Iterable[int]) -> None:
        """Have the names behind these state keys, until the change set is written."""
        known = self.caches.names.state_key_names
        lacking = [nid for nid in state_key_nids if nid not in self.state_key_names]
        self.state_key_names.update((nid, known[nid]) for nid in lacking if nid in known)
        self._ensure("state_key_names", lacking, self.state_key_names, known)

    def ensure_principals(self, names: Iterable[str]) -> None:
        """Know the nids of these users and servers, or that they have none."""
        self._ensure("principals", names, self.principals, self.caches.names.principals)

    def ensure_places(self, event_nids: Iterable[int]) -> None:
        """Have the places of these events."""
        self._ensure("places", event_nids, self.places, self.caches.places)

    def ensure_standing(self, event_nids: Iterable[int]) -> None:
        """Have the places and rows of these events, to walk on from them."""
        unknown = [
            nid
            for nid in event_nids
            if (nid not in self.places and nid not in self.caches.places)
            or self.known_row(nid) is None
        ]
        if unknown:
            raise MissingData("standing", unknown)

    def ensure_visible(self, room_nid: int, principal_nids: Iterable[int]) -> None:
        """Have the visibility rows of these principals."""
        if room_nid in self.fresh_rooms:
            return
        keys = (
            (room_nid, principal) for principal in principal_nids if principal not in self.newcomers
        )
        self._ensure("visibility", keys, self.visibility, self.caches.visibility)

    @staticmethod
    def _ensure(
        kind: str, keys: Iterable[Any], overlay: dict[Any, Any], cache: dict[Any, Any]
    ) -> None:
        unknown = [key for key in keys if key not in overlay and key not in cache]
        if unknown:
            raise MissingData(kind, unknown)

    def assume_new(self, event_ids: Iterable[str]) -> None:
        """Take these events for never heard of, without asking.

        A write that was planned so is refused if it is not true.
        """
        for event_id in event_ids:
            if event_id not in self.caches.rows:
                self.rows[event_id] = None
                self.waiting[event_id] = ()
                self.missing[event_id] = self.caches.missing.get(event_id)

    def answer(self, question: Hashable) -> Any:
        """What the database said to a question that only it can answer (see `storage.persist.load.by_kind`)."""
        if question not in self.answers:
            raise MissingData("questions", (question,))
        return self.answers[question]
