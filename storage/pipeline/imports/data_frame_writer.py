"""Writing a data frame into a store: `df.write.format("room_events").option("dsn", …).mode("append").save()`.

Needed is a column ``pdu``; ``room_version``, ``origin`` and ``state_before`` are taken as in an import; other columns are passed over, so what
was read can be written. Rooms may span partitions, and rows may come in any order. Tasks stage their rows in the database; when all have,
the driver stores room after room, in the order of ``stream_ordering`` where there is such a column, else of partitions and rows, and parents
first. A row that is no event is found before anything is stored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from storage.database.arrow import arrow_session
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
"""Reasons that are told of one task."""


@dataclass
class StagedByTask(WriterCommitMessage):
    """What a task staged.

    ``rejects``: how many rows are no events; ``reasons``: of some of them.
    """

    bundles: list[Bundle]
    rejects: int
    reasons: tuple[str, ...]


class EventWriter(DataSourceArrowWriter):
    """One batch write. Made on the driver, where it takes a number for what it stages."""

    def __init__(self, options: Options, columns: Sequence[str], *, overwrite: bool) -> None:
        if overwrite:
            raise InputError('events are never overwritten: write with mode("append")')
        if "pdu" not in columns:
            raise InputError("a column pdu is needed, with the bytes of the events")
        self.options = options
        self.target = StoreTarget(
            options.dsn, options.server_name, options.instance_name, config=options.config
        )
        with arrow_session(options.dsn, config=options.config) as conn:
            self.number = stages.new_number(conn)

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
        """Store what all tasks have staged.

        `InputError` if rows were not stored, unless that was asked for; the others are stored then.

        Where a row is no event at all, nothing is stored, unless that was asked for.
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

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002  # Spark's signature
        """Remove what tasks have staged."""
        with arrow_session(self.options.dsn, config=self.options.config) as conn:
            stages.remove(conn, self.number)

    def _stored(self, bundles: Sequence[Bundle], reader: StagedBundles) -> list[str]:
        """Store the rooms; why events were not stored."""
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
            raise InputError(
                f"{count} events were not stored, {rest}: {'; '.join(reasons[:REASONS_MAX])}"
            )
