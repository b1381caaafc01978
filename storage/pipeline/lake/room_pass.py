"""The next commit of a table that is read room by room: what changed is read again, and compared.

A room's rows are replaced if they differ. State changes are only appended, except where a purge or
a repair has changed those of a room.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.bulk import MirrorTasks
from storage.pipeline.lake.delta_table import LakeTable, MirrorState
from storage.pipeline.lake.facts import change_facts, room_nids
from storage.pipeline.lake.positions import cache_bounds
from storage.pipeline.lake.room_rows import changed_rooms, room_rows
from storage.pipeline.lake.sweep import gone_rooms, swept_rooms
from storage.pipeline.lake.tables import ROOMS, STATE_CHANGES
from storage.pipeline.source.filters import room_numbers
from storage.pipeline.source.token_bounds import between
from storage.streams import SyncToken

TOGETHER: Final = 2_000
"""Rooms that are compared at a time."""


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
        added, gone = self._changes(rooms, self.start, compare=compare)
        self.lake.commit([table for table in added if table.num_rows], state, gone)
        return sum(table.num_rows for table in added), len(gone)

    def _changes(
        self, rooms: LakeTable, start: SyncToken, *, compare: bool
    ) -> tuple[list[pa.Table], set[int]]:
        window = between(self.conn, start, self.end)
        facts = change_facts(self.conn, cache_bounds(self.conn, start, self.end))
        changed = changed_rooms(self.conn, window)
        states = room_nids(self.conn, facts.states)
        again = room_nids(self.conn, facts.replaced)
        gone: set[int] = set()
        if facts.everywhere or compare:
            again |= swept_rooms(self.conn, rooms, start, every=compare)
            gone = gone_rooms(self.conn, self.lake)
        added: list[pa.Table] = []
        if self.lake.table is STATE_CHANGES:
            new = sorted({*changed, *states} - again)
            added.append(room_rows(self.conn, STATE_CHANGES, new, window))
        elif self.lake.table is ROOMS:
            again |= {*changed, *states}
        else:
            again |= {nid for nid, stateful in changed.items() if stateful} | states
        replaced, rows = self._compared(sorted(again))
        return [*added, *rows], gone | replaced

    def _compared(self, room_numbers_: Collection[int]) -> tuple[set[int], list[pa.Table]]:
        """Return the rooms among these whose rows differ, and their rows."""
        every = between(self.conn, SyncToken(), self.end)
        names = self.lake.table.schema.names
        replaced: set[int] = set()
        rows: list[pa.Table] = []
        wanted = list(room_numbers_)
        for at in range(0, len(wanted), TOGETHER):
            some = wanted[at : at + TOGETHER]
            ours = _of_rooms(self.lake.rows(names, some), some)
            theirs = room_rows(self.conn, self.lake.table, some, every)
            differing = {row[0] for row in _set_of(ours) ^ _set_of(theirs)}
            replaced |= differing
            rows.append(_of_rooms(theirs, differing))
        return replaced, rows


def _of_rooms(table: pa.Table, room_nids_: Collection[int]) -> pa.Table:
    numbers = pa.array(sorted(room_nids_), pa.int64())
    return table.filter(pc.is_in(table.column("room_nid"), value_set=numbers))


def _set_of(table: pa.Table) -> set[tuple[Any, ...]]:
    return set(zip(*(column.to_pylist() for column in table.columns), strict=True))
