"""The changes of one write, collected event by event.

A `ChangeSet` overlays the caches (`storage.persist.model.cache_view.CacheView`). It collects the
rows that `storage.persist.write.all_tables` sends in one statement. They reach the caches when the
statement is sent (`storage.persist.commit.publish.absorb`).
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from storage.event import Event, relation_of
from storage.event.relation import target_key
from storage.graph.chains import ChainEntry, extended
from storage.persist.model.cache_view import CacheView
from storage.persist.model.caches import WriterCaches
from storage.persist.model.missing_data import MissingData
from storage.persist.model.rows import (
    AudienceRow,
    EventRow,
    MissingRow,
    PastRow,
    RoomRow,
    VisibilityRow,
)
from storage.state.groups import Group
from storage.visibility.audience_numbering import FIRST, NOTHING
from storage.visibility.multirange import EMPTY, Ranges

BLOCK_LENGTHS: Final = {  # the increments of the sequences in the schema
    "event_nids": 1000,
    "state_group_nids": 1000,
    "state_key_nids": 100,
    "type_nids": 10,
    "principal_nids": 100,
    "room_nids": 10,
    "auth_chain_nids": 1000,
}


class NidBlocks:
    """Numbers reserved from the sequences, one block at a time.

    Unused numbers of a process are lost, which is harmless.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, deque[int]] = {name: deque() for name in BLOCK_LENGTHS}

    def put(self, sequence: str, first: int) -> None:
        """Add a new block."""
        self._numbers[sequence].extend(range(first, first + BLOCK_LENGTHS[sequence]))

    def left(self, sequence: str) -> int:
        """Return how many numbers are reserved."""
        return len(self._numbers[sequence])

    def take(self, sequence: str) -> int:
        """Return the next number. Raise `MissingData` if none is reserved."""
        try:
            return self._numbers[sequence].popleft()
        except IndexError:
            raise MissingData("nids", (sequence,)) from None


CONTENT_KEYS: Final = ("url",)
"""The content keys that `ChangeSet.stored_columns` reads, in addition to the relation."""


class StoredColumns(NamedTuple):
    """The columns of `events` that no decision depends on: they are stored, and never loaded.

    For most events all of them are None.
    """

    relates_to: int | None = None
    rel_type_nid: int | None = None
    replaces: bool | None = None
    has_url: bool | None = None


class NewEvent(NamedTuple):
    """A row to insert into `events`: the columns that the planner knows, the others, the bytes."""

    row: EventRow
    raw: bytes
    stored: StoredColumns = StoredColumns()


class StateDelta(NamedTuple):
    """A change of a room's current state, at the position of the event that caused it."""

    room_nid: int
    cause_nid: int
    state_key_nid: int
    event_nid: int | None
    prev_event_nid: int | None


class MembershipChange(NamedTuple):
    """A new membership of a local user in a room.

    ``cause_nid`` is None for an outlier, which has no position of its own.
    """

    principal_nid: int
    room_nid: int
    membership: int
    event_nid: int
    cause_nid: int | None


class Reordering(NamedTuple):
    """A row of `reordered_events`: the topological position of an event before this write."""

    room_nid: int
    topological_before: int


class PendingResolution(Protocol):
    """A state resolution, finished or not (`storage.persist.plan.state_resolution`).

    ``seconds`` is the processor time that it took so far.
    """

    seconds: float

    def run(self, change_set: "ChangeSet") -> dict[int, int]:
        """Continue until the resolution is finished.

        Raise `MissingData` if data has to be loaded first, and `TimeSliceOver` if the time slice is
        over.
        """


@dataclass(slots=True)
class RoomChanges:
    """The state of a room while a batch is planned."""

    row: RoomRow
    extremities: dict[int, None]
    current: int | None
    next_audience: int
    max_order: int
    audience: int
    out_of_range: Ranges
    changed: bool = False
    live_nids: list[int] = field(default_factory=list)
    group_digests: dict[int, list[int]] = field(default_factory=dict)
    merged: dict[frozenset[int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, row: RoomRow) -> "RoomChanges":
        """Return the room as the table has it."""
        extremities = dict.fromkeys(row.forward_extremities)
        return cls(
            row,
            extremities,
            row.current_state_group,
            row.next_audience,
            row.max_topological_ordering,
            row.current_audience,
            row.out_of_range,
        )


class ChangeSet(CacheView):
    """The rows that one write inserts and updates, over the cached rows."""

    is_live = True
    """Whether events come from outside.

    It is False where stored events are planned again from the tables.
    """

    def __init__(
        self,
        caches: WriterCaches,
        blocks: NidBlocks,
        server_name: str,
        *,
        extremities_max: int | None = None,
    ) -> None:
        """Set up an empty change set.

        ``extremities_max`` limits the forward extremities of a room
        (`storage.persist.plan.extremity_limit`). None means no limit.
        """
        super().__init__(caches)
        self.extremities_max = extremities_max
        self.blocks = blocks
        self.server_name = server_name
        self.room_changes: dict[str, RoomChanges] = {}
        self.new_types: dict[str, int] = {}
        self.new_state_keys: dict[tuple[int, str], int] = {}
        self.new_principals: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.new_events: dict[int, NewEvent] = {}
        self.changed_events: dict[int, EventRow] = {}
        self.placed: dict[int, None] = {}  # nids that take a stream position, in order
        self.new_missing: dict[str, MissingRow] = {}
        self.gone_missing: dict[str, MissingRow] = {}
        self.new_groups: dict[int, Group] = {}
        self.new_places: dict[int, ChainEntry] = {}
        self.reserved_chains: dict[int, int] = {}
        self.reserved_groups: dict[Hashable, int] = {}  # of the event being planned
        self.resolving: dict[frozenset[int], PendingResolution] = {}  # of the event being planned
        self.current_changes: dict[tuple[int, int], tuple[int, int | None]] = {}
        self.deltas: list[StateDelta] = []
        self.memberships: dict[tuple[int, int], MembershipChange] = {}
        self.new_visibility: dict[tuple[int, int], VisibilityRow] = {}
        self.new_past: dict[tuple[int, int, int], PastRow] = {}
        self.new_audiences: dict[tuple[int, int], AudienceRow] = {}
        self.new_rooms: dict[str, RoomRow] = {}
        self.new_waiting: dict[int, tuple[int, str]] = {}
        self.gone_waiting: dict[int, None] = {}
        self.dropped: dict[int, int] = {}  # dropped forward extremities -> room nid
        self.moved: dict[int, Reordering] = {}  # by nid
        # Nids of events that arrived out of band before, and have their auth events now.
        self.authorised: dict[int, None] = {}
        # Room, state key and user of out-of-band memberships that end because this server joins.
        self.overruled: list[tuple[int, int, str]] = []
        # Stripped state as JSON, by principal and room.
        self.stripped: dict[tuple[int, int], str] = {}
        self.after_gaps: set[int] = set()  # live events that arrive before one of their prev_events

    @property
    def has_changes(self) -> bool:
        """Return whether there is anything to write."""
        return any(room.changed for room in self.room_changes.values())

    # ----------------------------------------------------------------------------------------------
    # names

    def type_nid(self, name: str) -> int:
        """Return the nid of an event type. Allocate one if it has none."""
        nid = self.new_types.get(name) or self.find_type(name)
        if nid is None:
            nid = self.blocks.take("type_nids")
            self.new_types[name] = self.types[name] = nid
            self.type_names[nid] = name
        return nid

    def stored_columns(self, event: Event) -> StoredColumns:
        """Return the columns that are only stored. A new type of relation is given a nid."""
        has_url = True if "url" in event.content else None
        relation = relation_of(event)
        if relation is None:
            return StoredColumns(has_url=has_url)
        return StoredColumns(
            relates_to=target_key(relation.event_id),
            rel_type_nid=self.type_nid(relation.rel_type),
            replaces=relation.replaces,
            has_url=has_url,
        )

    def state_key_nid(self, type_nid: int, state_key: str) -> int:
        """Return the nid of a state key. Allocate one if it has none."""
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
        self.rooms[room_id] = self.new_rooms[room_id] = row
        self.fresh_rooms.add(row.room_nid)
        return row

    # ----------------------------------------------------------------------------------------------
    # events

    def nid_for(self, event_id: str) -> int:
        """Return the nid reserved for a new event.

        Repeated calls in one change set return the same nid.
        """
        nid = self.reserved.get(event_id)
        if nid is None:
            nid = self.reserved[event_id] = self.blocks.take("event_nids")
        return nid

    def waiting_for(self, event_id: str) -> tuple[int, ...]:
        """Return the nids of redactions that wait for an event, here or in the tables."""
        new = tuple(nid for nid, (_, target) in self.new_waiting.items() if target == event_id)
        return (*super().waiting_for(event_id), *new)

    def add_event(self, row: EventRow, event: Event) -> None:
        """Add a new event. A timeline event takes the next stream position."""
        stored = self.stored_columns(event)  # may raise MissingData, so before anything is changed
        self.rows[row.event_id] = row
        self.row_ids[row.event_nid] = row.event_id
        self.events[row.event_nid] = event
        self.new_events[row.event_nid] = NewEvent(row, event.raw, stored)
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

    def place_outlier(self, row: EventRow, event: Event) -> None:
        """Add an outlier to the timeline: it keeps its nid and takes a stream position."""
        self.events[row.event_nid] = event
        self.change_event(row)
        self.placed[row.event_nid] = None
        self.allowed.clear()  # it may be rejected now, and be an auth event of others
        self.caches.allowed.clear()
        self.records.clear()
        self.caches.records.clear()

    def authorise(self, row: EventRow, event: Event) -> None:
        """Store an out-of-band event again, now with its auth events.

        From now on other events may name it as an auth event.
        """
        self.events[row.event_nid] = event
        self.change_event(row)
        self.authorised[row.event_nid] = None
        self.loose.discard(row.event_nid)
        self.allowed.clear()
        self.caches.allowed.clear()

    def add_missing(self, row: MissingRow) -> None:
        """Add a missing prev_event, or one more child of it."""
        self.missing[row.event_id] = self.new_missing[row.event_id] = row
        self.gap_ids[row.event_nid] = row.event_id

    def drop_missing(self, row: MissingRow) -> None:
        """Remove a missing prev_event that has arrived."""
        self.missing[row.event_id] = None
        self.new_missing.pop(row.event_id, None)
        self.gone_missing[row.event_id] = row

    # ----------------------------------------------------------------------------------------------
    # state and audiences

    def add_groups(self, room: RoomChanges, groups: Iterable[Group]) -> None:
        """Add new state groups."""
        for group in groups:
            self.groups[group.state_group] = self.new_groups[group.state_group] = group
            room.group_digests.setdefault(group.digest, []).append(group.state_group)

    def group_nid_for(self, base: Group, change: Mapping[int, int]) -> int:
        """Return the nid reserved for the state that results from this change of ``base``.

        Repeated calls for one event return the same nid.
        """
        key = base.state_group, frozenset(change.items())
        nid = self.reserved_groups.get(key)
        if nid is None:
            nid = self.reserved_groups[key] = self.blocks.take("state_group_nids")
        return nid

    def chain_nid_for(self, event_nid: int) -> int:
        """Return the nid reserved for a chain that starts at an event.

        Repeated calls in one change set return the same nid.
        """
        nid = self.reserved_chains.get(event_nid)
        if nid is None:
            nid = self.reserved_chains[event_nid] = self.blocks.take("auth_chain_nids")
        return nid

    def add_place(self, event_nid: int, entry: ChainEntry) -> None:
        """Set the chain position of a new event."""
        self.new_places[event_nid] = entry
        self.places[event_nid] = entry.place
        chain_nid = entry.place.chain_nid
        known = None if entry.place.sequence_number == 1 else self.chain(chain_nid)
        self.chains[chain_nid] = extended(known, entry)

    def knows_visibility(self, room_nid: int, principal_nid: int) -> bool:
        """Return whether a principal's row is available without loading."""
        key = (room_nid, principal_nid)
        return (
            principal_nid in self.newcomers
            or key in self.visibility
            or key in self.caches.visibility
        )

    def set_visibility(self, key: tuple[int, int], row: VisibilityRow) -> None:
        """Set the visibility row of a principal."""
        self.visibility[key] = self.new_visibility[key] = row

    def set_past(self, key: tuple[int, int], row: PastRow) -> None:
        """Set a `past_visibility` row of a principal, new or changed."""
        self.past.setdefault(key, {})[row.first_audience] = self.new_past[
            (*key, row.first_audience)
        ] = row

    def set_audience(self, key: tuple[int, int], row: AudienceRow) -> None:
        """Set the row of an audience."""
        self.audiences[key] = self.new_audiences[key] = row


def room_of(change_set: ChangeSet, event: Event) -> RoomChanges:
    """Return the room of an event. Add the room if it is new.

    While nothing of a room is stored, its version is that of the event.
    """
    known = change_set.room_changes.get(event.room_id)
    version = event.room_version.identifier
    if known is None or not (
        known.changed or known.row.write_version or known.row.room_version == version
    ):
        row = change_set.room(event.room_id)
        if row is None or (row.write_version == 0 and row.room_version != version):
            row = change_set.new_room(event.room_id, version)
        known = change_set.room_changes[event.room_id] = RoomChanges.of(row)
    return known
