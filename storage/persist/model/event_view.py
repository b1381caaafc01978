"""Events: their rows, their content, missing parents, and waiting redactions.

A view reads through to the caches of the process, and collects what the batch adds and changes.
"""

from collections.abc import Iterable, MutableMapping
from typing import Final, NamedTuple

from storage.database.names import TYPE_CREATE
from storage.errors import StorageCorrupt
from storage.event import Event, relation_of
from storage.event.relation import target_key
from storage.event.room_description import describes_room
from storage.persist.model.caches import WriterCaches
from storage.persist.model.missing_data import MissingData, ensure
from storage.persist.model.name_view import NameView
from storage.persist.model.nid_blocks import NidBlocks
from storage.persist.model.row_changes import Reordering
from storage.persist.model.rows import (
    EventRow,
    MissingRow,
)

CONTENT_KEYS: Final = ("url",)
"""The keys of a content that `EventView.stored_columns` looks for, beside the relation."""


class StoredColumns(NamedTuple):
    """The columns of `events` that no decision depends on: they are stored, and never loaded.

    For most events all of them are None.
    """

    relates_to: int | None = None
    rel_type_nid: int | None = None
    replaces: bool | None = None
    has_url: bool | None = None
    describes_room: bool | None = None


class NewEvent(NamedTuple):
    """A row to insert into `events`: the columns that the planner knows, the others, the bytes."""

    row: EventRow
    raw: bytes
    stored: StoredColumns = StoredColumns()


class EventView:
    """Events: their rows, their content, missing parents, and waiting redactions."""

    def __init__(self, caches: WriterCaches, blocks: NidBlocks, names: NameView) -> None:
        self.caches = caches
        self.blocks = blocks
        self.names = names
        self.rows: dict[str, EventRow | None] = {}
        self.row_ids: dict[int, str] = {}  # "" if no event has the nid
        self.missing: dict[str, MissingRow | None] = {}
        self.gap_ids: dict[int, str] = {}
        self.waiting: dict[str, tuple[int, ...]] = {}
        self.pending: EventRow | None = None
        self.pending_event: Event | None = None
        self.parsed: dict[int, Event] = {}
        self.reserved: MutableMapping[str, int] = {}
        self.new_events: dict[int, NewEvent] = {}
        self.new_creates: dict[int, list[int]] = {}  # nids of new create events, by room
        self.changed_events: dict[int, EventRow] = {}
        self.placed: dict[int, None] = {}  # nids that take a stream position, in order
        self.new_missing: dict[str, MissingRow] = {}
        self.gone_missing: dict[str, MissingRow] = {}
        self.new_waiting: dict[int, tuple[int, str]] = {}
        self.gone_waiting: dict[int, None] = {}
        self.moved: dict[int, Reordering] = {}  # by nid
        self.after_gaps: set[int] = set()  # live events that arrive before one of their prev_events
        self.out_of_order: dict[int, int] = {}  # in_order_ts of events out of time order, by nid
        self.authorised: dict[int, None] = {}
        self.readmitted: dict[int, None] = {}

    def row(self, event_id: str) -> EventRow | None:
        """Return the row of an event, or None if the event is not stored."""
        if self.pending is not None and self.pending.event_id == event_id:
            return self.pending
        if event_id in self.rows:
            return self.rows[event_id]
        row = self.caches.rows.row(event_id)
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
            None if event_id is None else self.rows.get(event_id) or self.caches.rows.row(event_id)
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
            None if event_id is None else self.rows.get(event_id) or self.caches.rows.row(event_id)
        )

    def row_of(self, event_nid: int) -> EventRow:
        """Return the row of a stored event. Raise `StorageCorrupt` if it is not stored."""
        row = self.find_row(event_nid)
        if row is None:
            raise StorageCorrupt("an event that a row refers to is not stored", event_nid=event_nid)
        return row

    def sender_of(self, row: EventRow) -> str:
        name = self.caches.names.principal_names.get(row.sender_nid)
        return name if name is not None else self.events_of((row.event_nid,))[row.event_nid].sender

    def at_hand(self, event_id: str) -> tuple[EventRow, Event] | None:
        """Return the row and content of an event if both are in memory. None means unknown."""
        if self.pending is not None and self.pending.event_id == event_id:
            return None if self.pending_event is None else (self.pending, self.pending_event)
        row = self.rows.get(event_id) or self.caches.rows.row(event_id)
        event = (
            None
            if row is None
            else self.parsed.get(row.event_nid) or self.caches.events.get(row.event_nid)
        )
        return None if row is None or event is None else (row, event)

    def events_of(self, event_nids: Iterable[int]) -> dict[int, Event]:
        """Return events with their content, by nid. All must be stored."""
        found: dict[int, Event] = {}
        unknown: list[int] = []
        for nid in event_nids:
            event = self.parsed.get(nid) or self.caches.events.get(nid)
            if event is None and self.pending is not None and self.pending.event_nid == nid:
                event = self.pending_event
            if event is None:
                unknown.append(nid)
            else:
                found[nid] = event
        if unknown:
            raise MissingData("events", unknown)
        return found

    def ensure_ids(self, event_ids: Iterable[str]) -> None:
        """Raise `MissingData` unless it is known of each of these events whether it is stored."""
        pending = self.pending.event_id if self.pending is not None else None
        ensure(
            "event_ids", (one for one in event_ids if one != pending), self.rows, self.caches.rows
        )

    def ensure_rows(self, event_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the rows of these events are loaded."""
        pending = self.pending.event_nid if self.pending is not None else None
        ensure(
            "event_nids",
            (nid for nid in event_nids if nid != pending),
            self.row_ids,
            self.caches.row_ids,
        )

    def assume_new(self, event_ids: Iterable[str]) -> None:
        """Assume that these events are new, without querying.

        If the assumption is wrong, the database refuses the write.
        """
        for event_id in event_ids:
            if event_id not in self.caches.rows:
                self.rows[event_id] = None
                self.waiting[event_id] = ()
                self.missing[event_id] = self.caches.missing.get(event_id)

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
        """Return the nids of the redactions that wait for an event, those of this batch too."""
        if event_id not in self.waiting:
            raise MissingData("event_ids", (event_id,))
        new = (nid for nid, (_, target) in self.new_waiting.items() if target == event_id)
        return (*self.waiting[event_id], *new)

    def nid_for(self, event_id: str) -> int:
        """Return the nid reserved for a new event.

        Repeated calls in one change set return the same nid.
        """
        nid = self.reserved.get(event_id)
        if nid is None:
            nid = self.reserved[event_id] = self.blocks.take("event_nids")
        return nid

    def stored_columns(self, event: Event) -> StoredColumns:
        """Return the columns that are only stored. A new type of relation is given a nid."""
        has_url = True if "url" in event.content else None
        relation = relation_of(event)
        if relation is None:
            return StoredColumns(has_url=has_url, describes_room=describes_room(event))
        return StoredColumns(
            relates_to=target_key(relation.event_id),
            rel_type_nid=self.names.type_nid(relation.rel_type),
            replaces=relation.replaces,
            has_url=has_url,
            describes_room=describes_room(event),
        )

    def add_event(self, row: EventRow, event: Event) -> None:
        """Add a new event. A timeline event takes the next stream position."""
        stored = self.stored_columns(event)  # may raise MissingData, so before anything is changed
        self.rows[row.event_id] = row
        self.row_ids[row.event_nid] = row.event_id
        self.parsed[row.event_nid] = event
        self.new_events[row.event_nid] = NewEvent(row, event.raw, stored)
        if row.type_nid == TYPE_CREATE:
            self.new_creates.setdefault(row.room_nid, []).append(row.event_nid)
        if not row.outlier:
            self.placed[row.event_nid] = None

    def change_event(self, row: EventRow) -> None:
        """Set new values for an event that is stored or that this change set adds."""
        self.rows[row.event_id] = row
        self.row_ids[row.event_nid] = row.event_id
        if row.event_nid in self.new_events:
            self.new_events[row.event_nid] = self.new_events[row.event_nid]._replace(row=row)
        else:
            self.changed_events[row.event_nid] = row

    def move_up(self, row: EventRow, topological_ordering: int) -> None:
        """Give an event a higher topological position.

        Its first position is recorded in `reordered_events`. An event of this write has no earlier
        position.
        """
        if row.event_nid not in self.placed:
            self.moved.setdefault(row.event_nid, Reordering(row.room_nid, row.order))
        self.change_event(row._replace(topological_ordering=topological_ordering))

    def add_missing(self, row: MissingRow) -> None:
        """Add a missing prev_event, or one more child of it."""
        self.missing[row.event_id] = self.new_missing[row.event_id] = row
        self.gap_ids[row.event_nid] = row.event_id

    def drop_missing(self, row: MissingRow) -> None:
        """Remove a missing prev_event that has arrived."""
        self.missing[row.event_id] = None
        self.new_missing.pop(row.event_id, None)
        self.gone_missing[row.event_id] = row
