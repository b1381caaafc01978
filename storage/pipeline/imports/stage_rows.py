"""Stage rows of a data frame in the database, until the driver stores their rooms.

Rooms span the partitions of a frame, and a task knows only its own rows. So a task stages the bytes
of its rows, and bundles of slim events, in the table `import_events`. Only the locations of the
bundles go to the driver. The driver then has whole rooms, and stores them as an import does. Each
attempt at a task stages at separate places, and only those of the attempt that Spark chose are
read.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, LiteralString, Self

import pyarrow as pa
import uvloop
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from storage.codec import encode
from storage.database.arrow_results import ArrowConnection, arrow_session
from storage.database.connection import Connection, Database
from storage.errors import DatabaseConflict, InputError, InvalidEvent
from storage.event import Event
from storage.persist.write.streams import writers_dictionary
from storage.pipeline.imports import stage as stages
from storage.pipeline.imports.append_events import BULK_TIMEOUT_MS, Loader, StoreTarget, TaskAttempt
from storage.pipeline.imports.intern_names import BundleLocation
from storage.pipeline.imports.lines import POSITION, TAKEN, parse_row, place_of, rows_of
from storage.pipeline.imports.load_rooms import RoomLoader, grouped
from storage.pipeline.imports.plan_rooms import BundledRoom
from storage.pipeline.imports.validate import BUNDLE, CHUNK, LineValidator, packed, slim_line
from storage.pipeline.source.filters import Options
from storage.rebuild.planner import BYTES_DELETED

SQL_BUNDLE: Final[LiteralString] = """
SELECT json
FROM import_events
WHERE import_number = $1::int AND place = $2::bigint
"""

Bundle = dict[str, Any]
"""The location of the slim events of a room: the input of `BundledRoom.add`, and ``room_id``."""


@dataclass(frozen=True, slots=True)
class StagingTask:
    """A task of a write.

    ``partition``: its index among the tasks; ``file``: a number that no other attempt has.
    """

    partition: int
    file: int


class RowStager:
    """Stages the rows of one task under the ``number`` of the write.

    A context manager. Raises `DatabaseError`.
    """

    def __init__(
        self, target: StoreTarget, number: int, source: StagingTask, examiner: LineValidator
    ) -> None:
        self._target = target
        self._number = number
        self._source = source
        self._examiner = examiner
        self._line = 0
        self._rooms: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
        self._staged: list[tuple[int, object]] = []
        self.bundles: list[Bundle] = []
        self.refused: list[str] = []

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stack = AsyncExitStack()
        try:
            self._conn = self._runner.run(self._opened())
            self._dictionary = self._runner.run(writers_dictionary(self._conn))
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._stack.aclose())
        finally:
            self._runner.close()

    async def _opened(self) -> Connection:
        """Open one transaction for the whole task.

        While it lasts, no import treats the rows of this write as left over.
        """
        config = replace(self._target.config, pool_size_max=1, statement_timeout_ms=BULK_TIMEOUT_MS)
        database = await self._stack.enter_async_context(
            await Database.open(self._target.dsn, config=config)
        )
        conn = await self._stack.enter_async_context(database.transaction())
        await stages.work(conn, self._number)
        return conn

    def take(self, batch: pa.RecordBatch) -> None:
        """Stage these rows; add the defects of bad ones to ``refused``."""
        for start in range(0, batch.num_rows, CHUNK):
            for row in rows_of(batch.slice(start, CHUNK), (*TAKEN, POSITION)):
                self._add(row)
            self._put()

    def end(self) -> None:
        """Stage the remaining bundles."""
        for (room_id, version), rows in self._rooms.items():
            if rows:
                self._emit(room_id, version, rows)
        self._put()

    def _add(self, row: dict[str, Any]) -> None:
        try:
            content = parse_row(row)
        except InvalidEvent as error:
            self.refused.append(str(error))
            return
        event = self._examiner.parsed(content)
        if not isinstance(event, Event):
            self.refused.append(f"{event.event_id}: {event.reason}")
            return
        place = self._place()
        rank = (
            (row[POSITION] or 0)
            if POSITION in row
            else place_of(self._source.partition, self._line)
        )
        stored = encode(event.raw, event.event_id, event.room_id, self._dictionary)
        self._staged.append((place, stored))
        key = event.room_id, event.room_version.identifier
        *rest, (rank, last) = content.steps(rank)
        for at, step in rest:  # far from the others of a bundle: overlapping ones share memory
            self._emit(*key, [slim_line(event, at, place, step)])
        rows = self._rooms.setdefault(key, [])
        rows.append(slim_line(event, rank, place, last))
        if len(rows) >= BUNDLE:
            self._emit(*key, rows)

    def _place(self) -> int:
        self._line += 1
        return place_of(self._source.file, self._line)

    def _emit(self, room_id: str, version: str, rows: list[tuple[Any, ...]]) -> None:
        data, place, ranks = packed(rows), self._place(), [row[0] for row in rows]
        self._staged.append((place, data))
        where = {"file": "", "start": place, "length": len(data)}
        within = {"path_index": 0, "first": min(ranks), "last": max(ranks), "events": len(rows)}
        self.bundles.append({"room_id": room_id, "room_version": version, **within, **where})
        rows.clear()

    def _put(self) -> None:
        staged, self._staged = self._staged, []
        self._runner.run(stages.put(self._conn, self._number, staged))


class StagedBundles:
    """Reads the bundles of a write: the ``reader`` of a `BundledRoom`."""

    def __init__(self, conn: ArrowConnection, number: int) -> None:
        self._conn = conn
        self._number = number

    def get(self, location: BundleLocation) -> bytes:
        """Return the bundle staged there. Raise `DatabaseConflict` if it is gone."""
        found = self._conn.rows(SQL_BUNDLE, self._number, location.start)
        if not found:
            raise DatabaseConflict(BYTES_DELETED)
        data: bytes = found[0]["json"]
        return data


def gathered(bundles: Iterable[Bundle], reader: StagedBundles) -> Iterator[BundledRoom]:
    """Yield the rooms of all bundles, in the order of their first ranks."""
    rooms: dict[str, BundledRoom] = {}
    for bundle in sorted(bundles, key=lambda row: int(row["first"])):
        rooms.setdefault(bundle["room_id"], BundledRoom(bundle["room_id"], reader)).add(bundle)
    yield from rooms.values()


# --------------------------------------------------------------------------------------------------
# Write a data frame into a store, as the format ``room_events``.
#
#   df.write.format("room_events").option("dsn", …).mode("append").save()
#
# The column ``pdu`` is required. ``room_version``, ``origin`` and ``state_before`` are used as in
# an import. Other columns are ignored, so rows that were read can be written. Rooms may span
# partitions, and rows may come in any order. Tasks stage their rows in the database. When all are
# done, the driver stores room after room, parents first. The order is that of ``stream_ordering``
# if there is such a column, else of partitions and rows. An invalid row is found before any event
# is stored.

REASONS_MAX = 5
"""Reasons that one task reports."""


@dataclass
class StagedByTask(WriterCommitMessage):
    """The rows that a task staged.

    ``rejects``: how many rows are no events; ``reasons``: of some of them.
    """

    bundles: list[Bundle]
    rejects: int
    reasons: tuple[str, ...]


class EventWriter(DataSourceArrowWriter):
    """One batch write. It is created on the driver, where it takes a number for its staged rows."""

    def __init__(self, options: Options, columns: Sequence[str], *, overwrite: bool) -> None:
        if overwrite:
            raise InputError('events are never overwritten: write with mode("append")')
        if "pdu" not in columns:
            raise InputError("a column pdu with the bytes of the events is required")
        self.options = options
        self.target: StoreTarget = StoreTarget(
            options.dsn, options.server_name, options.instance_name, config=options.config
        )
        with arrow_session(options.dsn, config=options.config) as conn:
            self.number: int = stages.new_number(conn)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one partition."""
        context = TaskContext.get()
        source = (
            StagingTask(0, 0)
            if context is None
            else StagingTask(context.partitionId(), context.taskAttemptId())
        )
        with RowStager(
            self.target,
            self.number,
            source,
            LineValidator({}, room_version=self.options.room_version),
        ) as gatherer:
            for batch in iterator:
                gatherer.take(batch)
            gatherer.end()
        return StagedByTask(
            gatherer.bundles, len(gatherer.refused), tuple(gatherer.refused[:REASONS_MAX])
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Store the rows that all tasks have staged.

        Raise `InputError` if rows were not stored, unless ``rejects`` is "ignore"; the others are
        stored then. Where a row is no event at all, nothing is stored, unless ``rejects`` is
        "ignore".
        """
        written = [message for message in messages if isinstance(message, StagedByTask)]
        with arrow_session(self.options.dsn, config=self.options.config) as conn:
            stages.hold(conn, self.number)
            try:
                self._refuse(
                    sum(task.rejects for task in written),
                    [reason for task in written for reason in task.reasons],
                    "nothing was stored",
                )
                reader = StagedBundles(conn, self.number)
                failed = self._stored(
                    list(chain.from_iterable(task.bundles for task in written)), reader
                )
            finally:
                stages.remove(conn, self.number)
        self._refuse(len(failed), failed, "the others were")

    def abort(
        self,
        messages: list[WriterCommitMessage | None],  # noqa: ARG002  # Spark's signature
    ) -> None:
        """Remove the rows that tasks have staged."""
        with arrow_session(self.options.dsn, config=self.options.config) as conn:
            stages.remove(conn, self.number)

    def _stored(self, bundles: Sequence[Bundle], reader: StagedBundles) -> list[str]:
        """Store the rooms; return why events were not stored."""
        reasons: list[str] = []
        with Loader(self.target, TaskAttempt.of(TaskContext.get())) as loader:
            rooms = RoomLoader(loader, self.number, self.target.part)
            for group in grouped(gathered(bundles, reader), self.target.part):
                for batch in rooms.load(group):
                    reasons += [
                        f"{row['event_id']}: {row['reason'] or row['outcome']}"
                        for row in batch.to_pylist()
                    ]
        return reasons

    def _refuse(self, count: int, reasons: Sequence[str], rest: str) -> None:
        if count and not self.options.ignore_rejects:
            events = "1 event was" if count == 1 else f"{count} events were"
            raise InputError(f"{events} not stored, {rest}: {'; '.join(reasons[:REASONS_MAX])}")
