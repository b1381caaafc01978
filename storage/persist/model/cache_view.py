"""Events: their rows, their content, missing parents, and waiting redactions.

A view reads through to the caches of the process, and collects what the batch adds and changes.
"""

from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from typing import Final, NamedTuple

from storage.database.names import TYPE_CREATE
from storage.errors import StorageCorrupt
from storage.event import Event, relation_of
from storage.event.model import target_key
from storage.event.ndjson import describes_room
from storage.graph.chains import Chain, ChainEntry, ChainPosition, Closure, extended
from storage.ids import EventId
from storage.persist.model.caches import NidBlocks, WriterCaches
from storage.persist.model.missing_data import Answers, MissingData, ensure
from storage.persist.model.resolution_records import ResolutionRecord
from storage.persist.model.results import KnownTransaction, Transaction, TransactionKey
from storage.persist.model.rows import (
    UNSEEN,
    AudienceRow,
    AuthorisedBefore,
    CheckedLike,
    Counts,
    EventRow,
    MissingRow,
    PastRow,
    PendingResolution,
    Reordering,
    RoomChanges,
    RoomRow,
    StateDelta,
    VisibilityRow,
)
from storage.persistent_map import Map
from storage.state.groups import Group, derive, keeps_digest
from storage.visibility import rule
from storage.visibility.multirange import EMPTY, FIRST, NOTHING

# --------------------------------------------------------------------------------------------------
# Numbers of names: event types, state keys, users and servers.
#
# A view reads through to the caches of the process, and collects what the batch adds and changes.


class NameView:
    """Numbers of names: event types, state keys, users and servers."""

    def __init__(self, caches: WriterCaches, blocks: NidBlocks) -> None:
        self.caches = caches
        self.blocks = blocks
        self.types: dict[str, int | None] = {}
        self.type_names: dict[int, str] = {}
        self.state_keys: dict[tuple[int, str], int | None] = {}
        self.state_key_names: dict[int, tuple[int, str]] = {}
        self.principals: dict[str, int | None] = {}
        self.newcomers: set[int] = set()  # principals without a row in any table yet
        self.new_types: dict[str, int] = {}
        self.new_state_keys: dict[tuple[int, str], int] = {}
        self.new_principals: dict[str, int] = {}

    def find_type(self, name: str) -> int | None:
        """Return the nid of an event type, or None if it has none yet."""
        nid = self.caches.names.types.get(name) or self.types.get(name)
        if nid is None and name not in self.types:
            raise MissingData("types", (name,))
        return nid

    def type_name(self, type_nid: int) -> str:
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

    def ensure_state_key_names(self, state_key_nids: Iterable[int]) -> None:
        """Copy the names of these state keys into the view, so that they stay until the write.

        Raise `MissingData` for unknown ones.
        """
        cached = self.caches.names.state_key_names
        lacking = [nid for nid in state_key_nids if nid not in self.state_key_names]
        self.state_key_names.update((nid, cached[nid]) for nid in lacking if nid in cached)
        ensure("state_key_names", lacking, self.state_key_names, cached)

    def find_principal(self, name: str) -> int | None:
        """Return the nid of a user or server, or None if it has none yet."""
        nid = self.caches.names.principals.get(name) or self.principals.get(name)
        if nid is None and name not in self.principals:
            raise MissingData("principals", (name,))
        return nid

    def ensure_principals(self, names: Iterable[str]) -> None:
        """Raise `MissingData` unless the nid, or its absence, is known for each of these names."""
        ensure("principals", names, self.principals, self.caches.names.principals)

    def type_nid(self, name: str) -> int:
        """Return the nid of an event type. Allocate one if it has none."""
        nid = self.new_types.get(name) or self.find_type(name)
        if nid is None:
            nid = self.blocks.take("type_nids")
            self.new_types[name] = self.types[name] = nid
            self.type_names[nid] = name
        return nid

    def state_key_nid(self, type_nid: int, state_key: str) -> int:
        key = (type_nid, state_key)
        nid = self.find_state_key(type_nid, state_key)
        if nid is None:
            nid = self.blocks.take("state_key_nids")
            self.new_state_keys[key] = self.state_keys[key] = nid
            self.state_key_names[nid] = key
        return nid

    def principal_nid(self, name: str) -> int:
        """Return the nid of a user or server. Allocate one if it has none."""
        nid = self.find_principal(name)
        if nid is None:
            nid = self.blocks.take("principal_nids")
            self.new_principals[name] = self.principals[name] = nid
            self.newcomers.add(nid)
        return nid


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
        self.deleted_missing: dict[str, MissingRow] = {}
        self.new_waiting: dict[int, tuple[int, str]] = {}
        self.deleted_waiting: dict[int, None] = {}
        self.reordered: dict[int, Reordering] = {}  # by nid
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

    def row_in_memory(self, event_nid: int) -> EventRow | None:
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
        events: dict[int, Event] = {}
        unknown: list[int] = []
        for nid in event_nids:
            event = self.parsed.get(nid) or self.caches.events.get(nid)
            if event is None and self.pending is not None and self.pending.event_nid == nid:
                event = self.pending_event
            if event is None:
                unknown.append(nid)
            else:
                events[nid] = event
        if unknown:
            raise MissingData("events", unknown)
        return events

    def ensure_ids(self, event_ids: Iterable[str]) -> None:
        """Raise `MissingData` unless it is known of each of these events whether it is stored."""
        pending = self.pending.event_id if self.pending is not None else None
        ensure(
            "event_ids",
            (event_id for event_id in event_ids if event_id != pending),
            self.rows,
            self.caches.rows,
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
            self.reordered.setdefault(row.event_nid, Reordering(row.room_nid, row.order))
        self.change_event(row._replace(topological_ordering=topological_ordering))

    def add_missing(self, row: MissingRow) -> None:
        """Add a missing prev_event, or one more child of it."""
        self.missing[row.event_id] = self.new_missing[row.event_id] = row
        self.gap_ids[row.event_nid] = row.event_id

    def drop_missing(self, row: MissingRow) -> None:
        """Remove a missing prev_event that has arrived."""
        self.missing[row.event_id] = None
        self.new_missing.pop(row.event_id, None)
        self.deleted_missing[row.event_id] = row


# --------------------------------------------------------------------------------------------------
# State groups, what resolutions left to remember, and changes of current states.
#
# A view reads through to the caches of the process, and collects what the batch adds and changes.


class StateView:
    """State groups, what resolutions left to remember, and changes of current states."""

    def __init__(self, caches: WriterCaches, blocks: NidBlocks) -> None:
        self.caches = caches
        self.blocks = blocks
        self.groups: dict[int, Group] = {}
        self.counts: dict[int, Map[int, Counts]] = {}
        self.records: dict[int, list[ResolutionRecord]] = {}
        self.new_groups: dict[int, Group] = {}
        # Kept for the event being planned, so that planning it again is cheap. An event may be
        # left without a plan, so the keys have all that the values depend on.
        self.derived: dict[Hashable, Group] = {}
        self.empty_nids: dict[int, int] = {}
        self.complete_states: set[tuple[int, tuple[EventId, ...]]] = set()  # by room
        self.nearest: dict[Hashable, tuple[Group, Mapping[int, int]]] = {}
        self.growths: dict[tuple[int | None, int], Mapping[int, Counts]] = {}
        self.resolving: dict[frozenset[int], PendingResolution] = {}  # of the event being planned
        self.resolving_seconds: dict[str, float] = {}
        """Seconds of processor time that state resolutions took, by room."""
        self.current_changes: dict[tuple[int, int], tuple[int, int | None]] = {}
        self.absent_keys: set[tuple[int, int]] = set()
        """Those of `current_changes` that had no entry before this change set."""
        self.deltas: list[StateDelta] = []

    def group(self, state_group: int) -> Group:
        group = self.groups.get(state_group) or self.caches.groups.get(state_group)
        if group is None:
            raise MissingData("groups", (state_group,))
        return group

    def counts_of(self, state_group: int) -> "Map[int, Counts]":
        """Return the known counts of users in a state, by principal."""
        return self.counts.get(state_group) or self.caches.counts.get(state_group) or Map()

    def records_of(self, room_nid: int) -> list[ResolutionRecord]:
        """Return the recorded resolutions of a room, and move them from the caches to this view."""
        records = self.records.get(room_nid)
        if records is None:
            records = self.records[room_nid] = self.caches.records.pop(room_nid, [])
        return records

    def add_groups(self, room: RoomChanges, groups: Iterable[Group]) -> None:
        for group in groups:
            self.groups[group.state_group] = self.new_groups[group.state_group] = group
            if keeps_digest(group):
                room.group_digests.setdefault(group.digest, []).append(group.state_group)

    def change_current(self, delta: StateDelta, membership: int | None) -> None:
        """Change one key of a room's current state. ``membership`` is that of the new entry."""
        key = delta.room_nid, delta.state_key_nid
        if delta.prev_event_nid is None and key not in self.current_changes:
            self.absent_keys.add(key)
        self.current_changes[key] = (delta.event_nid or 0, membership)
        self.deltas.append(delta)

    def derive(self, base: Group, change: Mapping[int, int]) -> Group:
        """Return the group of the state that results from this change of ``base``.

        It has a nid and no audience. Repeated calls for one event return the same group.
        """
        key = base.state_group, frozenset(change.items())
        group = self.derived.get(key)
        if group is None:
            nid = self.blocks.take("state_group_nids")
            group = self.derived[key] = derive(base, change, nid, NOTHING)
        return group

    def empty_nid(self, room_nid: int) -> int:
        """Return the nid reserved for the empty state group of a new room."""
        nid = self.empty_nids.get(room_nid)
        if nid is None:
            nid = self.empty_nids[room_nid] = self.blocks.take("state_group_nids")
        return nid

    def forget_event(self) -> None:
        """Forget the intermediate results of the event whose plan is complete now."""
        self.derived.clear()
        self.empty_nids.clear()
        self.complete_states.clear()
        self.nearest.clear()
        self.growths.clear()
        self.resolving.clear()


# --------------------------------------------------------------------------------------------------
# The chain cover of the auth graph, and auth checks that were done before.
#
# A view reads through to the caches of the process, and collects what the batch adds and changes.


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

    def chain_position(self, event_nid: int) -> ChainPosition:
        """Return the chain position of an accepted state event."""
        position = self.places.get(event_nid) or self.caches.places.row(event_nid)
        if position is None:
            raise MissingData("places", (event_nid,))
        return position

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
            or self.events.row_in_memory(nid) is None
        ]
        if unknown:
            raise MissingData("standing", unknown)

    def add_chain_position(self, event_nid: int, entry: ChainEntry) -> None:
        """Set the chain position of a new event."""
        self.new_places[event_nid] = entry
        self.places[event_nid] = entry.position
        chain_nid = entry.position.chain_nid
        chain = None if entry.position.sequence_number == 1 else self.chain(chain_nid)
        self.chains[chain_nid] = extended(chain, entry)


# --------------------------------------------------------------------------------------------------
# Transactions of local users: the event that a request of a client has made.
#
# A client repeats a request under the same transaction id and path if it lost the answer. The
# repeated one returns the first event. A request with the same id and another path is a new one.


class TransactionRow(NamedTuple):
    """A row to insert into `local_transactions`."""

    event_nid: int
    room_nid: int
    sender_nid: int
    device_id: str
    transaction_id: str
    event_id: str


class TransactionView:
    """Transactions that are stored, and those of the batch.

    A repeated request is found in the batch, in the caches, or among the rows that were looked up.
    A request that another process stores meanwhile is in none of them: the primary key refuses the
    write. The next attempt then looks it up.
    """

    def __init__(self, caches: WriterCaches) -> None:
        self.caches = caches
        self.events: dict[TransactionKey, KnownTransaction] = {}
        """The events of the batch, and those of rows that were looked up."""
        self.taken: set[TransactionKey] = set()
        """Keys of all rows that were looked up, also of those of requests with other paths."""
        self.new: list[TransactionRow] = []

    def first_event(self, transaction: Transaction) -> EventId | None:
        """Return the event of a repeated request, or None for a new one."""
        for key in transaction.stored_as():
            stored = self._find(key)
            if stored is not None and stored.path == transaction.path:
                return stored.event_id
        return None

    def add(self, transaction: Transaction, row: EventRow) -> None:
        key, with_path = transaction.stored_as()
        if transaction.needs_path or key in self.taken or self._find(key) is not None:
            key = with_path
        event_id = EventId(row.event_id)
        self.events[key] = KnownTransaction(event_id, transaction.path)
        ids = key.device_id, key.transaction_id, event_id
        self.new.append(TransactionRow(row.event_nid, row.room_nid, row.sender_nid, *ids))

    def _find(self, key: TransactionKey) -> KnownTransaction | None:
        return self.events.get(key) or self.caches.transactions.get(key)


# --------------------------------------------------------------------------------------------------
# Rooms: their rows, and how they change.
#
# A view reads through to the caches of the process, and collects what the batch adds and changes.


class RoomView:
    """Rooms: their rows, and how they change."""

    def __init__(self, caches: WriterCaches, blocks: NidBlocks) -> None:
        self.caches = caches
        self.blocks = blocks
        self.rows: dict[str, RoomRow | None] = {}
        self.fresh_rooms: set[int] = set()  # rooms without a row in any table yet
        self.room_changes: dict[str, RoomChanges] = {}
        self.new_rooms: dict[str, RoomRow] = {}
        self.dropped: dict[int, int] = {}  # dropped forward extremities -> room nid

    def room(self, room_id: str) -> RoomRow | None:
        """Return the row of a room, or None if the store does not know the room."""
        if room_id in self.rows:
            return self.rows[room_id]
        row = self.caches.rooms.get(room_id)
        if row is None:
            raise MissingData("rooms", (room_id,))
        return row

    def new_room(self, room_id: str, room_version: str) -> RoomRow:
        """Add a room that the store does not know yet."""
        row = RoomRow(
            self.blocks.take("room_nids"),
            room_id,
            room_version,
            0,
            FIRST,
            None,
            0,
            (),
            NOTHING,
            EMPTY,
        )
        self.rows[room_id] = self.new_rooms[room_id] = row
        self.fresh_rooms.add(row.room_nid)
        return row


# --------------------------------------------------------------------------------------------------
# Audiences, and the rows that say which of them a principal belongs to.
#
# A view reads through to the caches of the process, and collects what the batch adds and changes.


class VisibilityView:
    """Audiences, and the rows that say which of them a principal belongs to."""

    def __init__(
        self, caches: WriterCaches, names: NameView, rooms: RoomView, answers: Answers
    ) -> None:
        self.caches = caches
        self.names = names
        self.rooms = rooms
        self.answers = answers
        self.current: dict[tuple[int, int], VisibilityRow] = {}
        self.past: dict[tuple[int, int], dict[int, PastRow]] = {}  # keyed by the lowest audience
        self.audiences: dict[tuple[int, int], AudienceRow] = {}
        self.new_visibility: dict[tuple[int, int], VisibilityRow] = {}
        self.new_past: dict[tuple[int, int, int], PastRow] = {}
        self.new_audiences: dict[tuple[int, int], AudienceRow] = {}
        self.absent_visibility: set[tuple[int, int]] = set()
        """Those of `new_visibility` that have no row in the table."""
        self.absent_audiences: set[tuple[int, int]] = set()

    def visible(self, room_nid: int, principal_nid: int) -> VisibilityRow:
        key = (room_nid, principal_nid)
        row = self.current.get(key) or self.caches.visibility.row(key)
        if row is None:
            if principal_nid in self.names.newcomers or room_nid in self.rooms.fresh_rooms:
                return UNSEEN
            raise MissingData("visibility", (key,))
        return row

    def ensure_visible(self, room_nid: int, principal_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the visibility rows of these principals are loaded."""
        if room_nid in self.rooms.fresh_rooms:
            return
        keys = (
            (room_nid, principal)
            for principal in principal_nids
            if principal not in self.names.newcomers
        )
        ensure("visibility", keys, self.current, self.caches.visibility)

    def knows_visibility(self, room_nid: int, principal_nid: int) -> bool:
        """Return whether a principal's row is available without loading."""
        key = (room_nid, principal_nid)
        return (
            principal_nid in self.names.newcomers
            or key in self.current
            or key in self.caches.visibility
        )

    def audience(self, room_nid: int, number: int) -> AudienceRow:
        key = (room_nid, number)
        row = self.audiences.get(key) or self.caches.audiences.row(key)
        if row is None:
            raise MissingData("audiences", (key,))
        return row

    def ensure_audiences(self, room_nid: int, audiences: Iterable[int]) -> None:
        """Raise `MissingData` unless the rows of these audiences are loaded."""
        ensure(
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
        """Return whether a row has so many ranges that older ones move to `past_visibility`."""
        return rule.boundary(row.audiences, row.invited_audiences) is not None

    def set_visibility(self, key: tuple[int, int], row: VisibilityRow) -> None:
        if key not in self.new_visibility and not self._has_visibility(key):
            self.absent_visibility.add(key)
        self.current[key] = self.new_visibility[key] = row

    def set_past(self, key: tuple[int, int], row: PastRow) -> None:
        """Set a `past_visibility` row of a principal, new or changed."""
        self.past.setdefault(key, {})[row.first_audience] = self.new_past[
            (*key, row.first_audience)
        ] = row

    def set_audience(self, key: tuple[int, int], row: AudienceRow) -> None:
        """Set the row of an audience. One that was not looked up before is new."""
        if key not in self.audiences and key not in self.caches.audiences:
            self.absent_audiences.add(key)
        self.audiences[key] = self.new_audiences[key] = row

    def _has_visibility(self, key: tuple[int, int]) -> bool:
        """Return whether the table may have a row of a principal that was looked up.

        A stored row may equal `UNSEEN`, but is another object. A cached one may not be stored.
        """
        row = self.current.get(key)
        return key in self.caches.visibility if row is None else row is not UNSEEN
