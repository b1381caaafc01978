"""Plan a room again, as an import plans a new one: under its nids, and in the order of arrival.

If an event needs one that came later, that was an outlier until then, and is planned as one first.
If it came before its parents, a caller gave the state before it; that is read from the stored
states.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, LiteralString

from storage.codec import StoredBytes
from storage.database.connection import Connection, Database
from storage.database.names import InternedNames
from storage.errors import StorageCorrupt
from storage.event import Event
from storage.event.model import auth_ids_of
from storage.ids import EventId, RoomId
from storage.maintenance.room_states import RoomStates
from storage.maintenance.verify.event_loader import id_of_bytes
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent, Readmission
from storage.persist.model.missing_data import Answers
from storage.persist.model.results import AppendResult, Origin
from storage.persist.plan.redactions import plan_readmission
from storage.rebuild.arrivals import (
    SQL_REJECTED,
    ArrivalRow,
    RebuiltRoom,
    arrivals,
    doubled,
    misnamed,
    named,
    stand_in,
    state_given,
)
from storage.rebuild.planner import PlannedRoom, RoomLines, RoomPlanner, SlimEvent, event_of
from storage.rebuild.shadow_tables import ShadowTables

CHUNK: Final = 1_000

SQL_MARK_PARTIAL: Final[LiteralString] = """
WITH mark AS (
    INSERT INTO partial_rooms (room_nid, began_ts, origin, servers, join_event_id)
    VALUES ($1::int, 0, '', '{}', $2::text)
)
UPDATE rooms
SET is_partial = true
WHERE room_nid = $1::int
"""


class RoomReplan(RoomPlanner):
    """The planner of one room, into the shadow tables.

    ``database``: for the live tables, on connections without shadow tables. ``given``: states
    before events that replace those of the tables, by event id.
    """

    def __init__(
        self,
        shadow: ShadowTables,
        database: Database,
        room: RebuiltRoom,
        *,
        server_name: str,
        names: InternedNames,
        given: Mapping[str, tuple[EventId, ...]],
    ) -> None:
        self._nids: dict[str, int] = {}
        """The nids of events in the live tables, as far as they were loaded."""
        self._shadow = shadow
        self._live = database
        self._room = room
        self._given = given
        self._states = RoomStates()
        self.correct_ids: dict[int, str] = {}
        """The ids of events that are stored under another id than their bytes have."""
        self._outliers: set[int] = set()
        self.has_foreign: bool = False
        """Whether the shadow tables have events of other rooms."""
        self._is_early = False
        self._are_ids_compared = False
        self.arrived: dict[int, ArrivalRow] = {}
        """Since the last write, without bytes."""
        self.doubled: set[int] = set()
        """Rows of events that another row has, too: they are left out."""
        self.unreadable: dict[int, StorageCorrupt] = {}
        """Events that were planned by their columns, and why."""
        self.kept_edges: set[int] = set()
        """Rejected events whose auth events are gone since."""
        self.renamed: dict[int, bytes] = {}
        """The bytes of events that get another id, because the stored form depends on it."""
        super().__init__(shadow.conn, database, names, NidBlocks(), server_name)

    async def prepare(self, *, is_renamed: bool) -> None:
        """Find doubled events, and events under another id than their bytes have.

        ``is_renamed``: accepted events can have one, too. Raise `StorageCorrupt` if one has.
        """
        self._are_ids_compared = is_renamed
        async with self._live.connection() as reader:
            async for nid, event_id in misnamed(reader, self._room, every=is_renamed):
                self.correct_ids[nid] = event_id
            async for nid in doubled(reader, self._room, self.correct_ids):
                self.doubled.add(nid)
            for nid, event_id in self.correct_ids.items():
                [stored] = await self._stored(reader, [event_id]) or [nid]
                if self._nids.setdefault(event_id, stored) != nid:
                    self.doubled.add(nid)

    async def _stored(self, reader: Connection, event_ids: Iterable[str]) -> list[int]:
        """Return the nids of those of these events that are stored in this room."""
        return [
            row.event_nid
            for row in await named(reader, event_ids)
            if row.is_held
            and row.room_nid == self._room.room_nid
            and row.event_nid not in self.doubled
            and row.event_nid not in self.correct_ids
        ]

    async def take(
        self, room: PlannedRoom, event_nids: Sequence[int], *, outliers: bool = False
    ) -> None:
        """Plan events. ``outliers``: those that were not planned before, and all as outliers."""
        left_out = self.doubled | self._outliers if outliers else self.doubled
        wanted = [nid for nid in event_nids if nid not in left_out]
        async with self._live.connection() as reader:
            rows = await arrivals(reader, wanted)
            if outliers:
                self._outliers.update(wanted)
            lines = [
                await self._line(reader, row, "outlier" if outliers and not row.outlier else None)
                for row in rows
            ]
        self.arrived.update((row.event_nid, row._replace(json=StoredBytes(b""))) for row in rows)
        await self.plan([RoomLines(room, self._room.room_version, lines)])
        self.results.clear()

    async def _line(self, reader: Connection, row: ArrivalRow, origin: Origin | None) -> SlimEvent:
        try:
            event = row.read(self._room, self.correct_ids.get(row.event_nid))
        except StorageCorrupt as error:
            if self._id_of_bytes(row) is not None and not self._are_ids_compared:
                raise
            event = await stand_in(reader, self._room, row, error)
            self.unreadable[row.event_nid] = error
        self._nids[event.event_id] = row.event_nid
        if event.event_id != row.event_id and event.event_id != self._id_of_bytes(row):
            self.renamed[row.event_nid] = event.raw
        given = None if origin == "outlier" else self._given.get(event.event_id)
        return row.line(event, origin, given)

    def _id_of_bytes(self, row: ArrivalRow) -> str | None:
        return id_of_bytes(row.json, self._room.room_id, self._room.room_version)

    async def readmit(self, event_nid: int) -> None:
        """Plan the readmission of an event that is written and refused."""
        async with self._live.connection() as reader:
            [row] = await arrivals(reader, [event_nid])
        event_id, room_id = EventId(row.event_id), RoomId(self._room.room_id)
        await self._complete(
            lambda: plan_readmission(self.change_set, Readmission(event_id, room_id)), event_id
        )

    async def mark_partial(self, join_event_id: str) -> None:
        """Mark the room as partial, as it was before its join. Everything planned is written."""
        row = self._caches.rooms.get(self._room.room_id)
        if row is None:
            raise StorageCorrupt("a partial room has no state", room_id=self._room.room_id)
        await self.connection.execute(SQL_MARK_PARTIAL, row.room_nid, join_event_id)
        self._caches.rooms[row.room_id] = row._replace(is_partial=True)
        changes = self.change_set.rooms.room_changes.get(row.room_id)
        if changes is not None:
            changes.row = changes.row._replace(is_partial=True)

    def _new_change_set(self, answers: Answers) -> ChangeSet:
        """Use the numbers of the live tables for new events, where these have any."""
        change_set = super()._new_change_set(answers)
        change_set.is_live = False
        change_set.events.reserved = ChainMap({}, self._nids)
        return change_set

    async def _held(self, conn: Connection, event_ids: set[str]) -> set[str]:
        """Return events of other rooms; learn the nids of the others."""
        rows = await named(conn, event_ids) if event_ids else []
        for row in rows:
            if (
                row.room_nid == self._room.room_nid
                and row.event_nid not in self.doubled
                and row.event_nid not in self.correct_ids
            ):
                self._nids.setdefault(row.event_id, row.event_nid)
        foreign = {
            row.event_id
            for row in rows
            if row.is_held
            and row.room_nid != self._room.room_nid
            and row.event_id not in self.correct_ids.values()
        }
        if foreign:
            self.has_foreign = True
            self._written |= foreign  # so that they are loaded from the shadow tables
            await self._shadow.copy_foreign(foreign)
        return foreign

    # ----------------------------------------------------------------------------------------------
    # what comes early

    async def _planned(self, incoming: IncomingEvent) -> AppendResult:
        result = await super()._planned(incoming)
        if result.outcome != "missing_parents" or (
            incoming.origin == "outlier" and not self._is_early
        ):
            return result
        event = incoming.event
        state = incoming.state_before
        parents = set(event.prev_event_ids)
        if incoming.origin != "outlier" and not parents.isdisjoint(result.missing):
            state = self._given.get(event.event_id) or await self._state_given(event)
        needed = set(result.missing) - (parents - set(auth_ids_of(event))) | set(state or ())
        await self._early(sorted(one for one in needed if self._is_absent(one)))
        incoming = incoming._replace(state_before=state)
        result = await super()._planned(incoming)
        if result.outcome != "missing_parents":
            return result
        nid = self._nids[event.event_id]
        async with self._live.connection() as reader:
            reason: str | None = await reader.fetchval(SQL_REJECTED, nid)
        if reason is None:
            return result
        # it cites events of another room that was purged since
        result = await super()._planned(incoming._replace(rejected=reason))
        if result.is_stored:
            self.kept_edges.add(nid)
        return result

    def _is_absent(self, event_id: str) -> bool:
        return (
            self.change_set.events.rows.get(event_id) is None
            and event_id not in self._caches.rows
            and event_id not in self._written
        )

    async def _state_given(self, event: Event) -> tuple[EventId, ...]:
        async with self._live.connection() as reader:
            [row] = await arrivals(reader, [self._nids[event.event_id]])
            state = await state_given(reader, self._states, row)
        return tuple(EventId(self.correct_ids.get(nid, one)) for nid, one in state)

    async def _early(self, event_ids: Iterable[str]) -> None:
        """Plan events as outliers, after the events that they need in turn."""
        async with self._live.connection() as reader:
            ids = list(event_ids)
            known = [self._nids[one] for one in ids if one in self._nids]
            known += await self._stored(reader, [one for one in ids if one not in self._nids])
            rows = await arrivals(reader, known)
            lines = [await self._line(reader, row, "outlier") for row in rows]
        was_early, self._is_early = self._is_early, True
        for row, line in zip(rows, lines, strict=True):
            event = event_of(line, self._room.room_id, self._room.room_version)
            async with self._live.connection() as reader:
                await self._know(reader, [event], [line])
            if (await self._planned(IncomingEvent(event, "outlier"))).is_stored:
                self.places.setdefault(event.event_id, row.event_nid)
        self._is_early = was_early
