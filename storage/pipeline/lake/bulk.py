"""Many rows at once: tasks of Spark read ranges of the store and write the files of a commit.

The driver then commits all files together. Tasks read in snapshots of their own. They leave out
events after the end of the pass. Later changes are in the facts of the next pass. Other tasks merge
files of a table.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from storage.config import Config
from storage.database.arrow_results import ArrowConnection, arrow_snapshot
from storage.pipeline.lake.delta_table import LakeTable, MirrorFile, gathered, merged, write_rows
from storage.pipeline.lake.event_rows import (
    MARKS,
    event_rows,
    marks_by_position,
    marks_of_events,
    marks_of_rooms,
)
from storage.pipeline.lake.room_rows import ROOMS_PER_STATEMENT, room_rows, room_versions
from storage.pipeline.lake.tables import EVENTS, TABLES, MirrorTable
from storage.pipeline.session import executor_errors
from storage.pipeline.source.filters import Chosen, by_position, room_numbers, split
from storage.pipeline.source.rows import spark_ddl
from storage.pipeline.source.token_bounds import SQL_FIRST_ROOM, Bounds, deployment_of, filled
from storage.streams import SyncToken

RESULT: Final = pa.schema([("result", pa.string())])
FEW_ROOMS: Final = 2_000
"""Up to so many rooms are read without Spark."""
FEW_ROWS: Final = 20_000
"""Fewer rows are merged without Spark."""


@dataclass(frozen=True, slots=True)
class BulkTask:
    """Reads a range of a table, and writes files: stream orderings for events, else room nids."""

    dsn: str = field(repr=False)  # it may contain a password
    folder: str
    table: str
    within: Bounds
    config: Config = field(default_factory=Config.from_env)

    def results(self, begin: int, end: int) -> Iterator[str]:
        """Yield each file, and the nids of readmitted events, which it leaves out, as JSON."""
        with arrow_snapshot(self.dsn, config=self.config) as conn:
            for rows in self._rows(conn, begin, end):
                if self.table == EVENTS.name:
                    is_new = pc.equal(rows.column("arrived"), rows.column("stream_ordering"))
                    readmitted = rows.filter(pc.invert(is_new)).column("event_nid").to_pylist()
                    yield orjson.dumps({"readmitted": readmitted}).decode()
                    new_rows = rows.filter(is_new)
                else:
                    new_rows = rows
                if new_rows.num_rows:
                    for file in write_rows(self.folder, TABLES[self.table], new_rows):
                        yield orjson.dumps({"file": asdict(file)}).decode()

    def _rows(self, conn: ArrowConnection, begin: int, end: int) -> Iterator[pa.Table]:
        if self.table == EVENTS.name:
            pages = by_position(conn, begin, end, self.within, Chosen(outliers=False))
            return gathered(rows for nids in pages for rows in event_rows(conn, nids))
        steps = filled(conn, SQL_FIRST_ROOM, begin, end, ROOMS_PER_STATEMENT)
        return gathered(
            room_rows(conn, TABLES[self.table], range(low, high), self.within)
            for low, high in steps
        )


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Merges files of a table."""

    folder: str
    table: str

    def results(self, *paths: str) -> Iterator[str]:
        """Yield each file that has the rows of these, as JSON."""
        for file in merged(self.folder, TABLES[self.table], paths):
            yield orjson.dumps({"file": asdict(file)}).decode()


@dataclass(frozen=True, slots=True)
class MirrorTasks:
    """Runs such tasks; without Spark one after another. At most ``tasks`` read the store."""

    spark: SparkSession | None
    dsn: str = field(repr=False)
    tasks: int
    config: Config

    def events(self, window: Bounds, folder: str) -> tuple[list[MirrorFile], list[int]]:
        """Write the events of a window; return the files, and the nids of readmitted events."""
        task = BulkTask(self.dsn, folder, EVENTS.name, window, self.config)
        ranges = list(split(window.after + 1, window.upto, self.tasks))
        return _results(self._run(task.results, ranges))

    def rooms(self, lake: LakeTable, first: int, last: int, within: Bounds) -> list[MirrorFile]:
        """Write the rows of all rooms with nids from ``first`` to ``last``."""
        task = BulkTask(self.dsn, lake.folder, lake.table.name, within, self.config)
        if last - first < FEW_ROOMS:
            return _results(task.results(first, last + 1))[0]
        return _results(self._run(task.results, list(split(first, last, self.tasks))))[0]

    def merged(
        self, folder: str, table: MirrorTable, groups: Sequence[Sequence[MirrorFile]]
    ) -> list[MirrorFile]:
        work = MergeTask(folder, table.name).results
        parts = [tuple(file.path for file in group) for group in groups]
        if sum(file.rows for group in groups for file in group) < FEW_ROWS:
            return _results(line for paths in parts for line in work(*paths))[0]
        return _results(self._run(work, parts))[0]

    def _run(
        self, work: Callable[..., Iterator[str]], parts: Sequence[tuple[Any, ...]]
    ) -> Iterable[str]:
        """Yield the results of all parts, each the arguments of one task."""
        if self.spark is None:
            return (line for part in parts for line in work(*part))

        def write(batches: Any) -> Any:
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    lines = list(work(*parts[index]))
                    yield pa.RecordBatch.from_pydict({"result": lines}, schema=RESULT)

        frame = self.spark.range(0, len(parts), 1, max(len(parts), 1))
        with executor_errors():
            return [row["result"] for row in frame.mapInArrow(write, spark_ddl(RESULT)).collect()]


def _results(lines: Iterable[str]) -> tuple[list[MirrorFile], list[int]]:
    files: list[MirrorFile] = []
    readmitted: list[int] = []
    for line in lines:
        result = orjson.loads(line)
        if "file" in result:
            files.append(MirrorFile(**result["file"]))
        else:
            readmitted += result["readmitted"]
    return files, readmitted


# --------------------------------------------------------------------------------------------------
# Compare the mirror's `events` with the store: rows that are gone, and events to read again.
#
# Both sides are read piece by piece, so memory depends on what differs, not on the store:
#
#   all events   by ranges of stream orderings; the log has the range of `arrived` in each file,
#   which
#                is the stream ordering of an event unless it was readmitted
#   some rooms   as many rooms as have `PIECE` events, and three columns of each file

PIECE: Final = 20_000
"""Stream orderings, or events of rooms, that are compared at a time."""


@dataclass(slots=True)
class MirrorChanges:
    """The changes of a pass: ``deleted`` are values of `arrived`, ``again`` nids to read again."""

    deleted: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)

    def take(self, marks: pa.Table) -> None:
        """Read these rows again, in place of those that the table has."""
        self.deleted.update(marks.column("arrived").to_pylist())
        self.again.update(marks.column("event_nid").to_pylist())

    def drop(self, ours: pa.Table) -> None:
        """Delete these rows of the table."""
        self.deleted.update(ours.column("arrived").to_pylist())

    def add(self, other: "MirrorChanges") -> None:
        self.deleted |= other.deleted
        self.again |= other.again


def compare_all(conn: ArrowConnection, lake: LakeTable, covered: Bounds) -> MirrorChanges:
    """Compare all events that the position of the table covers."""
    changes = MirrorChanges()
    for first, last, stored in marks_by_position(conn, covered, PIECE):
        ours = lake.within(MARKS.names, first, last)
        arrived = stored.column("arrived")
        keys = arrived.filter(pc.or_(pc.less(arrived, first), pc.greater(arrived, last)))
        changes.take(
            _differing(stored, pa.concat_tables([ours, lake.rows(MARKS.names, keys.to_pylist())]))
        )
        # The rest of ours is gone, or was readmitted: then it is stored at another position.
        rest = _missing(ours, stored)
        readmitted = marks_of_events(conn, rest.column("event_nid").to_pylist(), covered)
        readmitted = readmitted.filter(_is_in(readmitted, rest))
        changes.take(_differing(readmitted, rest))
        changes.drop(_missing(rest, readmitted))
    return changes


def compare_rooms(
    conn: ArrowConnection, lake: LakeTable, room_nids: Collection[int], covered: Bounds
) -> MirrorChanges:
    """Compare the events of these rooms; those of a room that is not stored are gone."""
    changes = MirrorChanges()
    for rooms, stored in marks_of_rooms(conn, sorted(room_nids), covered, PIECE):
        nids = pa.array(rooms, pa.int64())
        parts = [
            part.filter(pc.is_in(part.column("room_nid"), value_set=nids)).select(MARKS.names)
            for part in lake.parts(["room_nid", *MARKS.names])
        ]
        ours = pa.concat_tables([MARKS.empty_table(), *parts])
        changes.take(_differing(stored, ours))
        changes.drop(_missing(ours, stored))
    return changes


def _differing(stored: pa.Table, ours: pa.Table) -> pa.Table:
    """Return the stored events that are not among ours with the same digest."""
    arrived, digest = (ours.column(name).to_numpy() for name in ("arrived", "digest"))
    order = np.argsort(arrived)
    positions = stored.column("arrived").to_numpy()
    at = np.searchsorted(arrived, positions, sorter=order)
    same = at < len(order)
    matches = order[at[same]]
    same[same] = (arrived[matches] == positions[same]) & (
        digest[matches] == stored.column("digest").to_numpy()[same]
    )
    return stored.filter(pa.array(~same))


def _missing(rows: pa.Table, others: pa.Table) -> pa.Table:
    """Return the rows that arrived where none of the others did."""
    return rows.filter(pc.invert(_is_in(rows, others)))


def _is_in(rows: pa.Table, others: pa.Table) -> pa.ChunkedArray:
    return pc.is_in(rows.column("arrived"), value_set=others.column("arrived"))


# --------------------------------------------------------------------------------------------------
# Which rooms have changed without a fact that names them.
#
# The table `rooms` of the mirror has the numbers of each room when it was read. A table that is at
# least as far has seen every change up to these numbers. So a room with the same numbers has not
# changed for it since. A table that is not as far, because it was mirrored less often, compares all
# rooms.
#
# Rooms are compared in pieces by their numbers. Of all rooms, memory has a byte each, no more.

NUMBERS: Final = ["room_nid", "write_version", "removals"]
RoomNumbers = npt.NDArray[np.int64]
SWEPT_PIECE: Final = 50_000
"""Rooms that are compared at a time."""


def swept_rooms(
    conn: ArrowConnection, rooms: LakeTable, start: SyncToken, *, every: bool
) -> Iterator[RoomNumbers]:
    """Yield the stored rooms to read again for a table at ``start``, piece by piece.

    ``every``: read all again.
    """
    state = rooms.state()
    all_again = every or state is None or not _token(conn, state.position) <= start
    for piece, stored in _pieces(conn):
        if all_again:
            yield stored.column("room_nid").to_numpy()
        else:
            mirrored = rooms.within(NUMBERS, piece.start, piece.stop - 1)
            yield _swept_differences(stored, mirrored, piece).column("room_nid").to_numpy()


def deleted_rooms(conn: ArrowConnection, lake: LakeTable) -> set[int]:
    """Return the rooms of a table that are not stored any more."""
    first, last = room_numbers(conn)
    is_stored = np.zeros(last - first + 1, dtype=np.bool_)
    for _, stored in _pieces(conn):
        is_stored[stored.column("room_nid").to_numpy() - first] = True
    room_nids: set[int] = set()
    for part in lake.parts(["room_nid"]):
        numbers = np.unique(part.column("room_nid").to_numpy())
        is_kept = (numbers >= first) & (numbers <= last)
        is_kept[is_kept] = is_stored[numbers[is_kept] - first]
        room_nids.update(numbers[~is_kept].tolist())
    return room_nids


def _pieces(conn: ArrowConnection) -> Iterator[tuple[range, pa.Table]]:
    """Yield ranges of numbers of rooms, with the numbers of their rooms."""
    first, last = room_numbers(conn)
    for low, high in filled(conn, SQL_FIRST_ROOM, first, last + 1, SWEPT_PIECE):
        piece = range(low, high)
        yield piece, room_versions(conn, piece)


def _swept_differences(stored: pa.Table, mirrored: pa.Table, piece: range) -> pa.Table:
    """Return the stored rooms of a piece that are not known with the same numbers."""
    ours, theirs = (
        np.column_stack([column.to_numpy() for column in one.select(NUMBERS).columns])
        for one in (mirrored, stored)
    )
    numbers = np.full((len(piece), 2), -1, dtype=np.int64)  # no number of a room is negative
    numbers[ours[:, 0] - piece.start] = ours[:, 1:]
    differing = (numbers[theirs[:, 0] - piece.start] != theirs[:, 1:]).any(axis=1)
    return stored.filter(pa.array(differing))


def _token(conn: ArrowConnection, position: str) -> SyncToken:
    return SyncToken.parse(position, deployment_of(conn))
