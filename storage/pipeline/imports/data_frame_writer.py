"""Write a data frame into a store, as the format ``room_events``.

  df.write.format("room_events").option("dsn", …).mode("append").save()

The column ``pdu`` is required. ``room_version``, ``origin`` and ``state_before`` are used as in an
import. Other columns are ignored, so rows that were read can be written. Rooms may span partitions,
and rows may come in any order. Tasks stage their rows in the database. When all are done, the
driver stores room after room, parents first. The order is that of ``stream_ordering`` if there is
such a column, else of partitions and rows. An invalid row is found before any event is stored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from storage.database.arrow_results import arrow_session
from storage.errors import InputError
from storage.pipeline.imports import stage as stages
from storage.pipeline.imports.append_events import Loader, StoreTarget, TaskAttempt
from storage.pipeline.imports.load_rooms import RoomLoader, grouped
from storage.pipeline.imports.stage_rows import (
    Bundle,
    RowStager,
    StagedBundles,
    StagingTask,
    gathered,
)
from storage.pipeline.imports.validate import LineValidator
from storage.pipeline.source.options import Options

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
        written = [one for one in messages if isinstance(one, StagedByTask)]
        with arrow_session(self.options.dsn, config=self.options.config) as conn:
            stages.hold(conn, self.number)
            try:
                self._refuse(
                    sum(one.rejects for one in written),
                    [reason for one in written for reason in one.reasons],
                    "nothing was stored",
                )
                reader = StagedBundles(conn, self.number)
                failed = self._stored(
                    list(chain.from_iterable(one.bundles for one in written)), reader
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
