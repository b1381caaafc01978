"""Plan a room again, as an import plans a new one: under its nids, and in the order of arrival.

If an event needs one that came later, that was an outlier until then, and is planned as one first.
If it came before its parents, a caller gave the state before it; that is read from the stored
states.
"""

from collections import ChainMap
from collections.abc import Iterable, Sequence
from typing import Final

from storage.codec import StoredBytes
from storage.database.connection import Connection, Database
from storage.database.names import InternedNames
from storage.event import Event
from storage.ids import EventId, RoomId
from storage.maintenance.room_states import RoomStates
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent, Readmission
from storage.persist.model.missing_data import Answers
from storage.persist.model.results import AppendResult
from storage.persist.plan.redactions import plan_readmission
from storage.pipeline.imports.plan_rooms import PlannedRoom, RoomLines, RoomPlanner
from storage.pipeline.imports.validate import event_of
from storage.pipeline.rebuilding.arrivals import (
    ArrivalRow,
    LiveRoomRow,
    arrivals,
    named,
    state_given,
)
from storage.pipeline.rebuilding.shadow_tables import ShadowTables

CHUNK: Final = 1_000


class RoomReplan(RoomPlanner):
    """The planner of one room, into the shadow tables.

    ``database``: for the live tables, on connections without shadow tables.
    """

    def __init__(
        self,
        aside: ShadowTables,
        database: Database,
        server_name: str,
        names: InternedNames,
        live: LiveRoomRow,
    ) -> None:
        self._nids: dict[str, int] = {}
        """The nids of events in the live tables, as far as they were loaded."""
        self._aside = aside
        self._live = database
        self._held_as = live
        self._states = RoomStates()
        self._outliers: set[int] = set()
        self.has_foreign: bool = False
        """Whether the shadow tables have events of other rooms."""
        self._is_early = False
        self.arrived: dict[int, ArrivalRow] = {}
        """Since the last write, without bytes."""
        super().__init__(aside.conn, database, names, NidBlocks(), server_name)

    async def take(
        self, room: PlannedRoom, event_nids: Sequence[int], *, outliers: bool = False
    ) -> None:
        """Plan events. ``outliers``: those that were not planned before, and all as outliers."""
        wanted = [nid for nid in event_nids if not (outliers and nid in self._outliers)]
        async with self._live.connection() as reader:
            rows = await arrivals(reader, wanted)
        self._nids.update((row.event_id, row.event_nid) for row in rows)
        self.arrived.update((row.event_nid, row._replace(json=StoredBytes(b""))) for row in rows)
        if outliers:
            self._outliers.update(wanted)
        lines = [
            row.line(self._held_as, "outlier" if outliers and not row.outlier else None)
            for row in rows
        ]
        await self.plan([RoomLines(room, self._held_as.room_version, lines)])
        self.results.clear()

    async def readmit(self, event_nid: int) -> None:
        """Plan the readmission of an event that is written and refused."""
        async with self._live.connection() as reader:
            [row] = await arrivals(reader, [event_nid])
        event_id, room_id = EventId(row.event_id), RoomId(self._held_as.room_id)
        await self._complete(
            lambda: plan_readmission(self.change_set, Readmission(event_id, room_id)), event_id
        )

    def _new_change_set(self, answers: Answers) -> ChangeSet:
        """Use the numbers of the live tables for new events, where these have any."""
        change_set = super()._new_change_set(answers)
        change_set.is_live = False
        change_set.events.reserved = ChainMap({}, self._nids)
        return change_set

    async def _held(self, aside: Connection, event_ids: set[str]) -> set[str]:
        """Return events of other rooms; learn the nids of the others."""
        rows = await named(aside, event_ids) if event_ids else []
        self._nids.update(
            (row.event_id, row.event_nid) for row in rows if row.room_nid == self._held_as.room_nid
        )
        foreign = {
            row.event_id for row in rows if row.is_held and row.room_nid != self._held_as.room_nid
        }
        if foreign:
            self.has_foreign = True
            self._written |= foreign  # so that they are loaded from the shadow tables
            await self._aside.copy_foreign(foreign)
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
            state = await self._state_given(event)
        needed = set(result.missing) - (parents - set(event.auth_event_ids)) | set(state or ())
        await self._early(one for one in needed if self._is_absent(one))
        return await super()._planned(incoming._replace(state_before=state))

    def _is_absent(self, event_id: str) -> bool:
        return (
            self.change_set.events.rows.get(event_id) is None
            and event_id not in self._caches.rows
            and event_id not in self._written
        )

    async def _state_given(self, event: Event) -> tuple[EventId, ...]:
        async with self._live.connection() as reader:
            [row] = await arrivals(reader, [self._nids[event.event_id]])
            return tuple(map(EventId, await state_given(reader, self._states, row)))

    async def _early(self, event_ids: Iterable[str]) -> None:
        """Plan events as outliers, after the events that they need in turn."""
        async with self._live.connection() as reader:
            held = [
                row
                for row in await named(reader, event_ids)
                if row.is_held and row.room_nid == self._held_as.room_nid
            ]
            rows = await arrivals(reader, [row.event_nid for row in held])
        was_early, self._is_early = self._is_early, True
        for row in rows:
            self._nids[row.event_id] = row.event_nid
            line = row.line(self._held_as, "outlier")
            event = event_of(line, self._held_as.room_id, self._held_as.room_version)
            async with self._live.connection() as reader:
                await self._know(reader, [event], [line])
            if (await self._planned(IncomingEvent(event, "outlier"))).is_stored:
                self.places.setdefault(event.event_id, row.event_nid)
        self._is_early = was_early
