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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.bulk import MirrorTasks
from storage.pipeline.lake.delta_table import LakeTable, MirrorState
from storage.pipeline.lake.event_rows import (
    erased_names,
    event_rows,
    marks_of_events,
    marks_of_rooms,
    nids_of,
)
from storage.pipeline.lake.facts import change_facts, room_nids
from storage.pipeline.lake.files import FILE_ROWS, WrittenFile
from storage.pipeline.lake.positions import cache_bounds
from storage.pipeline.lake.sweep import gone_rooms, swept_rooms
from storage.pipeline.source.filters import Chosen, by_position, nth_position
from storage.pipeline.source.token_bounds import (
    Bounds,
    between,
    cut,
    lost_positions,
    position_of,
)
from storage.streams import SyncToken

WIDE: Final = 20_000
"""From so many new events on, tasks of Spark read them."""


@dataclass(slots=True)
class MirrorChanges:
    """The changes of a pass: ``gone`` are values of `arrived`, ``again`` nids to read again."""

    gone: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)

    def take(self, marks: pa.Table) -> None:
        """Read these rows again, in place of those that the table has."""
        self.gone.update(marks.column("arrived").to_pylist())
        self.again.update(marks.column("event_nid").to_pylist())


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
        found = MirrorChanges()
        covered = between(self.conn, SyncToken(), self.start)
        facts = change_facts(self.conn, cache_bounds(self.conn, self.start, self.end))
        nids = nids_of(self.conn, sorted(facts.event_ids))
        found.take(marks_of_events(self.conn, nids, covered))
        wanted = room_nids(self.conn, facts.replaced)
        gone: set[int] = set()
        if facts.everywhere or compare:
            wanted |= swept_rooms(self.conn, rooms, self.start, every=compare)
            gone = gone_rooms(self.conn, self.lake)
        if wanted or gone:
            self._compare(found, wanted, gone, covered)
        self._erased(found, covered)
        return found

    def commit(self, changes: MirrorChanges, position: str, bulk: MirrorTasks) -> tuple[int, int]:
        """Commit the pass; return the numbers of rows that were read, and deleted or replaced."""
        window = between(self.conn, self.start, self.end)
        written: list[WrittenFile] = []
        if nth_position(self.conn, window, WIDE) is None:
            new = [nid for page in _window(self.conn, window) for nid in page]
        else:
            written, new = bulk.events(window, self.lake.folder)
        nids = [*new, *sorted(changes.again - set(new))]
        for table in _gathered(event_rows(self.conn, nids)):
            changes.gone.update(_readmitted(table))
            written += self.lake.write(table)
        state = MirrorState(position, erased_digest(self.conn))
        self.lake.commit(written, state, changes.gone)
        return sum(file.rows for file in written), len(changes.gone)

    def _compare(
        self, found: MirrorChanges, wanted: set[int], gone: set[int], covered: Bounds
    ) -> None:
        """Compare the events of the rooms ``wanted``; the rows of those that are ``gone`` go."""
        numbers = pa.array(sorted(wanted | gone), pa.int64())
        columns = ["room_nid", "arrived", "digest"]
        table = pa.concat_tables(
            [
                self.lake.rows(columns, ()),
                *(
                    part.filter(pc.is_in(part.column("room_nid"), value_set=numbers))
                    for part in self.lake.parts(columns)
                ),
            ]
        )
        ours = dict(
            zip(
                table.column("arrived").to_pylist(),
                table.column("digest").to_pylist(),
                strict=True,
            )
        )
        marks = marks_of_rooms(self.conn, sorted(wanted), covered)
        same = [
            ours.pop(arrived, None) == digest
            for arrived, digest in zip(
                marks.column("arrived").to_pylist(), marks.column("digest").to_pylist(), strict=True
            )
        ]
        found.gone.update(ours)
        found.take(marks.filter(pc.invert(pa.array(same, pa.bool_()))))

    def _erased(self, found: MirrorChanges, covered: Bounds) -> None:
        """Read the events again of senders who were erased since, or are no longer."""
        if self.erased_before == erased_digest(self.conn):
            return
        table = self.lake.rows(["sender", "erased", "event_nid"])
        now = pc.is_in(
            table.column("sender"), value_set=pa.array(erased_names(self.conn), pa.string())
        )
        changed = table.filter(pc.not_equal(now, table.column("erased")))
        nids = changed.column("event_nid").to_pylist()
        found.take(marks_of_events(self.conn, nids, covered))


def erased_digest(conn: ArrowConnection) -> str:
    """Return a text that differs between any two sets of erased users; empty for none."""
    names = erased_names(conn)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:32] if names else ""


def _readmitted(table: pa.Table) -> list[int]:
    """Return where readmitted events arrived: the table may have them as they were refused."""
    arrived = table.column("arrived")
    found: list[int] = arrived.filter(
        pc.not_equal(arrived, table.column("stream_ordering"))
    ).to_pylist()
    return found


def _window(conn: ArrowConnection, window: Bounds) -> Iterable[list[int]]:
    if not window.parts:
        return ()
    return by_position(conn, window.after + 1, window.upto + 1, window, Chosen(outliers=False))


def _gathered(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows in tables of about `FILE_ROWS`."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(one.num_rows for one in held) >= FILE_ROWS:
            yield pa.concat_tables(held)
            held.clear()
    if held:
        yield pa.concat_tables(held)
