"""The next commit of the mirror's `events`: new rows, and what changed of earlier ones.

  new       events between the position of the table and that of the streams
  changed   events that a fact of "caches" names, and those of a sender who was erased, or is no
            longer; they are read again
  compared  the events of a room that a purge, a repair or a rebuild has changed: the digests of the
            table with those of the store; rows that are gone are deleted, others are read again

Everything is read in one snapshot. Only events that the table's position covers are compared and
read again. Those after it are new, and come as they are when they are read.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.bulk import (
    MirrorChanges,
    MirrorTasks,
    RoomNumbers,
    compare_all,
    compare_rooms,
    deleted_rooms,
    swept_rooms,
)
from storage.pipeline.lake.delta_table import LakeTable, MirrorFile, MirrorState, gathered
from storage.pipeline.lake.event_rows import erased_names, event_rows, marks_of_events, nids_of
from storage.pipeline.lake.room_rows import RoomSums, changed_rooms, room_rows
from storage.pipeline.lake.tables import (
    ROOMS,
    STATE_CHANGES,
    ChangeFacts,
    cache_bounds,
    change_facts,
    room_nids,
)
from storage.pipeline.source.filters import Chosen, by_position, nth_position, room_numbers
from storage.pipeline.source.token_bounds import Bounds, between, cut, lost_positions, position_of
from storage.streams import SyncToken

WIDE: Final = 20_000
"""From so many new events on, tasks of Spark read them."""
MANY_ROOMS: Final = 20_000
"""If more rooms have changed, all events are compared: for some rooms, all files are read, too."""


@dataclass(frozen=True, slots=True)
class EventPass:
    """A pass over `events`. ``end``: the position after it; ``more``: events wait after it."""

    conn: ArrowConnection
    lake: LakeTable
    start: SyncToken
    end: SyncToken
    erased_before: str
    more: bool

    @classmethod
    def of(
        cls,
        conn: ArrowConnection,
        lake: LakeTable,
        start: SyncToken,
        now: SyncToken,
        erased_before: str,
        *,
        batch: int,
    ) -> "EventPass":
        """Return the pass from ``start`` towards ``now``, with at most so many new events."""
        last = nth_position(conn, between(conn, start, now), batch)
        if last is None:
            return cls(conn, lake, start, now, erased_before, more=False)
        end = cut(start, now, last, lost_positions(conn))
        end = end.advance("caches", position_of(now, "caches"))
        return cls(conn, lake, start, end, erased_before, more=True)

    def changes(self, rooms: LakeTable, *, compare: bool) -> MirrorChanges:
        """Return what changed of rows that the table has. ``compare``: compare all rooms."""
        changes = MirrorChanges()
        covered = between(self.conn, SyncToken(), self.start)
        facts = change_facts(self.conn, cache_bounds(self.conn, self.start, self.end))
        nids = nids_of(self.conn, sorted(facts.event_ids))
        changes.take(marks_of_events(self.conn, nids, covered))
        if compare:
            changes.add(compare_all(self.conn, self.lake, covered))
        else:
            changes.add(self._compared(rooms, facts, covered))
        self._erased(changes, covered)
        return changes

    def commit(self, changes: MirrorChanges, position: str, bulk: MirrorTasks) -> tuple[int, int]:
        """Commit the pass; return the numbers of rows that were read, and deleted or replaced."""
        window = between(self.conn, self.start, self.end)
        written: list[MirrorFile] = []
        if nth_position(self.conn, window, WIDE) is None:
            new = [nid for page in _window(self.conn, window) for nid in page]
        else:
            written, new = bulk.events(window, self.lake.folder)
        nids = [*new, *sorted(changes.again - set(new))]
        for table in gathered(event_rows(self.conn, nids)):
            changes.deleted.update(_readmitted(table))
            written += self.lake.write(table)
        state = MirrorState(position, erased_digest(self.conn))
        self.lake.commit(written, state, changes.deleted)
        return sum(file.rows for file in written), len(changes.deleted)

    def _compared(self, rooms: LakeTable, facts: ChangeFacts, covered: Bounds) -> MirrorChanges:
        """Compare the events of rooms that a purge, a repair or a rebuild has changed."""
        nids = room_nids(self.conn, facts.replaced)
        if facts.everywhere:
            nids |= deleted_rooms(self.conn, self.lake)
            for some in swept_rooms(self.conn, rooms, self.start, every=False):
                nids.update(some.tolist())
                if len(nids) > MANY_ROOMS:
                    return compare_all(self.conn, self.lake, covered)
        return compare_rooms(self.conn, self.lake, nids, covered)

    def _erased(self, changes: MirrorChanges, covered: Bounds) -> None:
        """Read the events again of senders who were erased since, or are no longer."""
        if self.erased_before == erased_digest(self.conn):
            return
        names = pa.array(erased_names(self.conn), pa.string())
        for part in self.lake.parts(["sender", "erased", "event_nid"]):
            now = pc.is_in(part.column("sender"), value_set=names)
            changed = part.filter(pc.not_equal(now, part.column("erased")))
            nids = changed.column("event_nid").to_pylist()
            changes.take(marks_of_events(self.conn, nids, covered))


def erased_digest(conn: ArrowConnection) -> str:
    """Return a text that differs between any two sets of erased users; empty for none."""
    names = erased_names(conn)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:32] if names else ""


def _readmitted(table: pa.Table) -> list[int]:
    """Return where readmitted events arrived: the table may have them as they were refused."""
    arrived = table.column("arrived")
    positions: list[int] = arrived.filter(
        pc.not_equal(arrived, table.column("stream_ordering"))
    ).to_pylist()
    return positions


def _window(conn: ArrowConnection, window: Bounds) -> Iterable[list[int]]:
    if not window.parts:
        return ()
    return by_position(conn, window.after + 1, window.upto + 1, window, Chosen(outliers=False))


# --------------------------------------------------------------------------------------------------
# The next commit of a table that is read room by room: what changed is read again, and compared.
#
# A room's rows are replaced if they differ. State changes are only appended, except where a purge
# or a repair has changed those of a room.

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
        deleted: list[RoomNumbers] = []
        added = self._changes(rooms, self.start, deleted, compare=compare)
        files = [file for table in gathered(added) for file in self.lake.write(table)]
        replaced = np.unique(np.concatenate([NONE, *deleted]))
        self.lake.commit(files, state, replaced)
        return sum(file.rows for file in files), len(replaced)

    def _changes(
        self, rooms: LakeTable, start: SyncToken, deleted: list[RoomNumbers], *, compare: bool
    ) -> Iterator[pa.Table]:
        """Yield the rows to add; append the rooms with removed or replaced rows to ``deleted``."""
        window = between(self.conn, start, self.end)
        facts = change_facts(self.conn, cache_bounds(self.conn, start, self.end))
        new, again = self._named(facts, window)
        yield from self._compared(again, deleted)
        if facts.everywhere or compare:
            deleted.append(_numbers(deleted_rooms(self.conn, self.lake)))
            sums: RoomSums | None = None
            for some in swept_rooms(self.conn, rooms, start, every=compare):
                others = np.setdiff1d(some, again)
                if sums is None and len(others) > TOGETHER:
                    sums = self._sums()
                yield from self._compared(others, deleted, sums)
                new = np.setdiff1d(new, some)
        for at in range(0, len(new), TOGETHER):
            yield room_rows(self.conn, self.lake.table, new[at : at + TOGETHER].tolist(), window)

    def _named(self, facts: ChangeFacts, window: Bounds) -> tuple[RoomNumbers, RoomNumbers]:
        """Return the rooms whose new rows are appended, and those that are compared."""
        rooms = changed_rooms(self.conn, window)
        states = _numbers(room_nids(self.conn, facts.states))
        again = _numbers(room_nids(self.conn, facts.replaced))
        if self.lake.table not in (STATE_CHANGES, ROOMS):
            rooms = rooms.filter(pc.field("stateful"))
        changed = np.union1d(rooms.column("room_nid").to_numpy(), states)
        if self.lake.table is STATE_CHANGES:
            return np.setdiff1d(changed, again), again
        return NONE, np.union1d(changed, again)

    def _sums(self) -> RoomSums:
        """Return the sums of the rows that the table has, of all rooms that are stored."""
        parts = self.lake.parts(self.lake.table.schema.names)
        return RoomSums.of(*room_numbers(self.conn), parts)

    def _compared(
        self, rooms: RoomNumbers, deleted: list[RoomNumbers], sums: RoomSums | None = None
    ) -> Iterator[pa.Table]:
        """Yield the rows of the rooms among these whose rows differ; append them to ``deleted``.

        ``rooms`` are in order. With the ``sums`` of the table no file is read again for each part.
        """
        every = between(self.conn, SyncToken(), self.end)
        names = self.lake.table.schema.names
        for at in range(0, len(rooms), TOGETHER):
            some = rooms[at : at + TOGETHER].tolist()
            theirs = room_rows(self.conn, self.lake.table, some, every)
            ours = sums or RoomSums.of(some[0], some[-1], [self.lake.rows(names, some)])
            differing = ours.differing(some, theirs)
            deleted.append(_numbers(differing))
            yield _of_rooms(theirs, differing)


def _numbers(nids: Collection[int]) -> RoomNumbers:
    return np.fromiter(sorted(nids), np.int64, len(nids))


def _of_rooms(table: pa.Table, room_nids_: Collection[int]) -> pa.Table:
    numbers = pa.array(sorted(room_nids_), pa.int64())
    return table.filter(pc.is_in(table.column("room_nid"), value_set=numbers))
