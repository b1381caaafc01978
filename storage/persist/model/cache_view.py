"""The view that planning reads: caches of committed rows, overlaid by the additions of the batch.

Planning is synchronous and does not query the database. If a value is missing, it raises
`MissingData`, which names the missing keys. `storage.persist.commit.retry` loads them with
`storage.persist.load.by_kind` and plans the event again. A decision changes nothing until all its
data is loaded, so a second run is harmless.

Cached rows are immutable or guarded by `rooms.write_version`. The database refuses a write whose
plan used a stale version, and the caches are then cleared. Deletions by other processes arrive on
the stream "caches" (`Removed`). Until they arrive, `rooms.removals` protects the write: if it has
changed, the write checks that all its dependencies still exist.
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

    Additions reach the caches only when the batch is sent or committed
    (`storage.persist.commit.publish.absorb`).
    """

    def __init__(self, caches: WriterCaches) -> None:
        self.caches = caches
        self.rows: dict[str, EventRow | None] = {}
        self.row_ids: dict[int, str] = {}  # "" if no event has the nid
        self.missing: dict[str, MissingRow | None] = {}
        self.gap_ids: dict[int, str] = {}
        self.waiting: dict[str, tuple[int, ...]] = {}
        self.pending: EventRow | None = None
        self.pending_event: Event | None = None
        self.events: dict[int, Event] = {}
        self.groups: dict[int, Group] = {}
        self.visibility: dict[tuple[int, int], VisibilityRow] = {}
        self.past: dict[tuple[int, int], dict[int, PastRow]] = {}  # keyed by the lowest audience
        self.audiences: dict[tuple[int, int], AudienceRow] = {}
        self.counts: dict[int, Map[int, Counts]] = {}
        self.places: dict[int, ChainPosition] = {}
        self.chains: dict[int, Chain] = {}
        self.closures: dict[int, Closure] = {}
        self.loose: set[int] = set()  # events without a chain position in the database
        self.allowed: dict[tuple[object, ...], AuthorisedBefore] = {}
        self.rooms: dict[str, RoomRow | None] = {}
        self.types: dict[str, int | None] = {}
        self.type_names: dict[int, str] = {}
        self.state_keys: dict[tuple[int, str], int | None] = {}
        self.state_key_names: dict[int, tuple[int, str]] = {}
        self.principals: dict[str, int | None] = {}
        self.newcomers: set[int] = set()  # principals without a row in any table yet
        self.fresh_rooms: set[int] = set()  # rooms without a row in any table yet
        self.answers: dict[Hashable, Any] = {}
        self.records: dict[int, list[ResolutionRecord]] = {}
        self.time_slice = TimeSlice()
        self.resolving_seconds: dict[str, float] = {}
        """Seconds of processor time that state resolutions took, by room."""

    def row(self, event_id: str) -> EventRow | None:
        """Return the row of an event, or None if the event is not stored."""
        if self.pending is not None and self.pending.event_id == event_id:
            return self.pending
        if event_id in self.rows:
            return self.rows[event_id]
        row = self.caches.rows.get(event_id)
        if row is None:
            raise MissingData("event_ids", (event_id,))
        return row

    def find_row(self, event_nid: int) -> EventRow | None:
        """Return the row of an event by nid, or None if it is only referred to, not stored."""
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
        """Return the row of an event if it is in memory. None means unknown, not absent."""
        if self.pending is not None and self.pending.event_nid == event_nid:
            return self.pending
        event_id = self.row_ids.get(event_nid) or self.caches.row_ids.get(event_nid)
        return (
            None if event_id is None else self.rows.get(event_id) or self.caches.rows.get(event_id)
        )

    def sender_of(self, row: EventRow) -> str:
        """Return the sender of an event."""
        name = self.caches.names.principal_names.get(row.sender_nid)
        return name if name is not None else self.events_of((row.event_nid,))[row.event_nid].sender

    def row_of(self, event_nid: int) -> EventRow:
        """Return the row of a stored event. Raise `StorageCorrupt` if it is not stored."""
        row = self.find_row(event_nid)
        if row is None:
            raise StorageCorrupt("an event that a row refers to is not stored", event_nid=event_nid)
        return row

    def missing_row(self, event_id: str) -> MissingRow | None:
        """Return the `missing_events` row of an event, or None if no stored event is a child of it.

        An event that is stored as an outlier may have such a row, too.
        """
        if event_id in self.missing:
            return self.missing[event_id]
        row = self.caches.missing.get(event_id)
        if row is None:
            raise MissingData("event_ids", (event_id,))
        return row

    def gap(self, event_nid: int) -> MissingRow | None:
        """Return the missing event with this nid, or None if the event has arrived."""
        if event_nid not in self.gap_ids:
            raise MissingData("gap_nids", (event_nid,))
        return self.missing_row(self.gap_ids[event_nid])

    def waiting_for(self, event_id: str) -> tuple[int, ...]:
        """Return the nids of the redactions that wait for an event."""
        if event_id not in self.waiting:
            raise MissingData("event_ids", (event_id,))
        return self.waiting[event_id]

    def events_of(self, event_nids: Iterable[int]) -> dict[int, Event]:
        """Return events with their content, by nid. All must be stored."""
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
        """Return the row and content of an event if both are in memory. None means unknown."""
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
        """Return a state group with its full state."""
        group = self.groups.get(state_group) or self.caches.groups.get(state_group)
        if group is None:
            raise MissingData("groups", (state_group,))
        return group

    def counts_of(self, state_group: int) -> Map[int, Counts]:
        """Return the known counts of users in a state, by principal."""
        return self.counts.get(state_group) or self.caches.counts.get(state_group) or Map()

    def visible(self, room_nid: int, principal_nid: int) -> VisibilityRow:
        """Return the visibility row of a principal, or `UNSEEN` if it has none."""
        key = (room_nid, principal_nid)
        row = self.visibility.get(key) or self.caches.visibility.get(key)
        if row is None:
            if principal_nid in self.newcomers or room_nid in self.fresh_rooms:
                return UNSEEN
            raise MissingData("visibility", (key,))
        return row

    def ensure_audiences(self, room_nid: int, audiences: Iterable[int]) -> None:
        """Raise `MissingData` unless the rows of these audiences are loaded."""
        self._ensure(
            "audiences",
            ((room_nid, number) for number in audiences),
            self.audiences,
            self.caches.audiences,
        )

    def past_row(self, room_nid: int, principal_nid: int, number: int) -> PastRow:
        """Return the `past_visibility` row that covers an audience of a principal.

        Such an audience is lower than `first_audience` in the principal's `visibility` row.
        """
        for row in self.past.get((room_nid, principal_nid), {}).values():
            if row.tells_of(number):
                return row
        raise MissingData("past", ((room_nid, principal_nid, number),))

    def cuts(self, row: VisibilityRow) -> bool:
        """Return whether to move older ranges of a row to `past_visibility`.

        That needs two conditions: the row has too many ranges, and every running version knows the
        table.
        """
        if past.boundary(row.audiences, row.invited_audiences) is None:
            return False
        return self.caches.has_past or bool(self.answer(("has_past",)))

    def audience(self, room_nid: int, number: int) -> AudienceRow:
        """Return the row of an audience in use."""
        key = (room_nid, number)
        row = self.audiences.get(key) or self.caches.audiences.get(key)
        if row is None:
            raise MissingData("audiences", (key,))
        return row

    def place(self, event_nid: int) -> ChainPosition:
        """Return the chain position of an accepted state event."""
        place = self.places.get(event_nid) or self.caches.places.get(event_nid)
        if place is None:
            raise MissingData("places", (event_nid,))
        return place

    def chain(self, chain_nid: int) -> Chain:
        """Return a chain of the chain cover."""
        chain = self.chains.get(chain_nid) or self.caches.chains.get(chain_nid)
        if chain is None:
            raise MissingData("chains", (chain_nid,))
        return chain

    def room(self, room_id: str) -> RoomRow | None:
        """Return the row of a room, or None if the store does not know the room."""
        if room_id in self.rooms:
            return self.rooms[room_id]
        row = self.caches.rooms.get(room_id)
        if row is None:
            raise MissingData("rooms", (room_id,))
        return row

    def find_type(self, name: str) -> int | None:
        """Return the nid of an event type, or None if it has none yet."""
        nid = self.caches.names.types.get(name) or self.types.get(name)
        if nid is None and name not in self.types:
            raise MissingData("types", (name,))
        return nid

    def type_name(self, type_nid: int) -> str:
        """Return the event type of a nid."""
        name = self.caches.names.type_names.get(type_nid) or self.type_names.get(type_nid)
        if name is None:
            raise MissingData("type_names", (type_nid,))
        return name

    def find_state_key(self, type_nid: int, state_key: str) -> int | None:
        """Return the nid of a state key, or None if it has none yet."""
        key = (type_nid, state_key)
        nid = self.caches.names.state_keys.get(key) or self.state_keys.get(key)
        if nid is None and key not in self.state_keys:
            raise MissingData("state_keys", (key,))
        return nid

    def state_key_name(self, state_key_nid: int) -> tuple[int, str]:
        """Return the type nid and the state key of a nid.

        The name is copied to the change set, because the caches may drop it before the write.
        """
        name = self.state_key_names.get(state_key_nid)
        if name is None:
            name = self.caches.names.state_key_names.get(state_key_nid)
            if name is None:
                raise MissingData("state_key_names", (state_key_nid,))
            self.state_key_names[state_key_nid] = name
        return name

    def find_principal(self, name: str) -> int | None:
        """Return the nid of a user or server, or None if it has none yet."""
        nid = self.caches.names.principals.get(name) or self.principals.get(name)
        if nid is None and name not in self.principals:
            raise MissingData("principals", (name,))
        return nid

    def records_of(self, room_nid: int) -> list[ResolutionRecord]:
        """Return the recorded resolutions of a room, and move them from the caches to this view."""
        known = self.records.get(room_nid)
        if known is None:
            known = self.records[room_nid] = self.caches.records.pop(room_nid, [])
        return known

    # ----------------------------------------------------------------------------------------------
    # many at once

    def ensure_ids(self, event_ids: Iterable[str]) -> None:
        """Raise `MissingData` unless it is known of each of these events whether it is stored."""
        pending = self.pending.event_id if self.pending is not None else None
        self._ensure(
            "event_ids", (one for one in event_ids if one != pending), self.rows, self.caches.rows
        )

    def ensure_rows(self, event_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the rows of these events are loaded."""
        pending = self.pending.event_nid if self.pending is not None else None
        self._ensure(
            "event_nids",
            (nid for nid in event_nids if nid != pending),
            self.row_ids,
            self.caches.row_ids,
        )

    def ensure_state_key_names(self, state_key_nids: Iterable[int]) -> None:
        """Copy the names of these state keys into the view, so that they stay until the write.

        Raise `MissingData` for unknown ones.
        """
        known = self.caches.names.state_key_names
        lacking = [nid for nid in state_key_nids if nid not in self.state_key_names]
        self.state_key_names.update((nid, known[nid]) for nid in lacking if nid in known)
        self._ensure("state_key_names", lacking, self.state_key_names, known)

    def ensure_principals(self, names: Iterable[str]) -> None:
        """Raise `MissingData` unless the nid, or its absence, is known for each of these names."""
        self._ensure("principals", names, self.principals, self.caches.names.principals)

    def ensure_places(self, event_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the chain positions of these events are loaded."""
        self._ensure("places", event_nids, self.places, self.caches.places)

    def ensure_standing(self, event_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the chain positions and rows of these events are loaded.

        They are the starting points of a walk over auth chains.
        """
        unknown = [
            nid
            for nid in event_nids
            if (nid not in self.places and nid not in self.caches.places)
            or self.known_row(nid) is None
        ]
        if unknown:
            raise MissingData("standing", unknown)

    def ensure_visible(self, room_nid: int, principal_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the visibility rows of these principals are loaded."""
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
        """Assume that these events are new, without querying.

        If the assumption is wrong, the database refuses the write.
        """
        for event_id in event_ids:
            if event_id not in self.caches.rows:
                self.rows[event_id] = None
                self.waiting[event_id] = ()
                self.missing[event_id] = self.caches.missing.get(event_id)

    def answer(self, question: Hashable) -> Any:
        """Return the result of a query that only the database can answer.

        See `storage.persist.load.by_kind`.
        """
        if question not in self.answers:
            raise MissingData("questions", (question,))
        return self.answers[question]
