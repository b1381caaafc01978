"""The next commit of a table that is read room by room: what changed is read again, and compared.

A room's rows are replaced if they differ. State changes are only appended, except where a purge or
a repair has changed those of a room.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.bulk import MirrorTasks
from storage.pipeline.lake.delta_table import LakeTable, MirrorState
from storage.pipeline.lake.facts import ChangeFacts, change_facts, room_nids
from storage.pipeline.lake.files import gathered
from storage.pipeline.lake.positions import cache_bounds
from storage.pipeline.lake.room_rows import changed_rooms, room_rows
from storage.pipeline.lake.room_sums import RoomSums
from storage.pipeline.lake.sweep import RoomNumbers, gone_rooms, swept_rooms
from storage.pipeline.lake.tables import ROOMS, STATE_CHANGES
from storage.pipeline.source.filters import room_numbers
from storage.pipeline.source.token_bounds import Bounds, between
from storage.streams import SyncToken

TOGETHER: Final = 2_000
"""Rooms that are compared at a time."""
NONE: Final[RoomNumbers] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RoomPass:
    """A pass from ``start`` to ``end``; ``start`` None: the table is empty."""

    conn: ArrowConnection
    lake: LakeTable
    start: SyncToken | None
    end: SyncToken

    def commit(
        self, rooms: LakeTable, position: str, bulk: MirrorTasks, *, compare: bool
    ) -> tuple[int, int]:
        """Commit the pass; return the numbers of rows that were read, and of rooms replaced."""
        state = MirrorState(position)
        if self.start is None:
            every = between(self.conn, SyncToken(), self.end)
            files = bulk.rooms(self.lake, *room_numbers(self.conn), every)
            self.lake.commit(files, state)
            return sum(file.rows for file in files), 0
        gone: list[RoomNumbers] = []
        added = self._changes(rooms, self.start, gone, compare=compare)
        files = [file for table in gathered(added) for file in self.lake.write(table)]
        replaced = np.unique(np.concatenate([NONE, *gone]))
        self.lake.commit(files, state, replaced)
        return sum(file.rows for file in files), len(replaced)

    def _changes(
        self, rooms: LakeTable, start: SyncToken, gone: list[RoomNumbers], *, compare: bool
    ) -> Iterator[pa.Table]:
        """Yield the rows to add; append the rooms whose rows go, or are replaced, to ``gone``."""
        window = between(self.conn, start, self.end)
        facts = change_facts(self.conn, cache_bounds(self.conn, start, self.end))
        new, again = self._named(facts, window)
        yield from self._compared(again, gone)
        if facts.everywhere or compare:
            gone.append(_numbers(gone_rooms(self.conn, self.lake)))
            sums: RoomSums | None = None
            for some in swept_rooms(self.conn, rooms, start, every=compare):
                wanted = np.setdiff1d(some, again)
                if sums is None and len(wanted) > TOGETHER:
                    sums = self._sums()
                yield from self._compared(wanted, gone, sums)
                new = np.setdiff1d(new, some)
        for at in range(0, len(new), TOGETHER):
            yield room_rows(self.conn, self.lake.table, new[at : at + TOGETHER].tolist(), window)

    def _named(self, facts: ChangeFacts, window: Bounds) -> tuple[RoomNumbers, RoomNumbers]:
        """Return the rooms whose new rows are appended, and those that are compared."""
        found = changed_rooms(self.conn, window)
        states = _numbers(room_nids(self.conn, facts.states))
        again = _numbers(room_nids(self.conn, facts.replaced))
        if self.lake.table not in (STATE_CHANGES, ROOMS):
            found = found.filter(pc.field("stateful"))
        changed = np.union1d(found.column("room_nid").to_numpy(), states)
        if self.lake.table is STATE_CHANGES:
            return np.setdiff1d(changed, again), again
        return NONE, np.union1d(changed, again)

    def _sums(self) -> RoomSums:
        """Return the sums of the rows that the table has, of all rooms that are stored."""
        parts = self.lake.parts(self.lake.table.schema.names)
        return RoomSums.of(*room_numbers(self.conn), parts)

    def _compared(
        self, wanted: RoomNumbers, gone: list[RoomNumbers], sums: RoomSums | None = None
    ) -> Iterator[pa.Table]:
        """Yield the rows of the rooms among these whose rows differ; append them to ``gone``.

        ``wanted`` are in order. With the ``sums`` of the table no file is read again for each part.
        """
        every = between(self.conn, SyncToken(), self.end)
        names = self.lake.table.schema.names
        for at in range(0, len(wanted), TOGETHER):
            some = wanted[at : at + TOGETHER].tolist()
            theirs = room_rows(self.conn, self.lake.table, some, every)
            ours = sums or RoomSums.of(some[0], some[-1], [self.lake.rows(names, some)])
            differing = ours.differing(some, theirs)
            gone.append(_numbers(differing))
            yield _of_rooms(theirs, differing)


def _numbers(found: Collection[int]) -> RoomNumbers:
    return np.fromiter(sorted(found), np.int64, len(found))


def _of_rooms(table: pa.Table, room_nids_: Collection[int]) -> pa.Table:
    numbers = pa.array(sorted(room_nids_), pa.int64())
    return table.filter(pc.is_in(table.column("room_nid"), value_set=numbers))
