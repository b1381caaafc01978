"""Writing a data frame into a store: `df.write.format("room_events").option("dsn", …).mode("append").save()`.

Needed is a column ``pdu``; ``room_version``, ``origin`` and ``state_before`` are taken as in an import; other columns are passed over, so what
was read can be written. Each task goes through its own rows in their order, so the rows of a room belong into one partition, parents first
(`import_archive` sees to both). What lacks something is tried again at the end of its task, until nothing more gets stored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from storage.errors import InputError
from storage.event import Event
from storage.persist.plan import Incoming
from storage.pipeline.appending import BATCH_MAX, Arrival, Loader, Target
from storage.pipeline.examining import Examiner
from storage.pipeline.options import Options
from storage.pipeline.reading import given_of_row, rows_of

REASONS_MAX = 5
"""Reasons that are told of one task."""


@dataclass
class Written(WriterCommitMessage):
    """What a task did. ``rejects``: how many rows were not stored; ``reasons``: of some of them."""

    rejects: int
    reasons: tuple[str, ...]


class EventWriter(DataSourceArrowWriter):
    """One batch write."""

    def __init__(self, options: Options, columns: Sequence[str], *, overwrite: bool) -> None:
        if overwrite:
            raise InputError('events are never overwritten: write with mode("append")')
        if "pdu" not in columns:
            raise InputError("a column pdu is needed, with the bytes of the events")
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Store the rows of one partition."""
        options, refused = self.options, list[str]()
        examiner = Examiner({}, room_version=options.room_version)
        target = Target(options.dsn, options.server_name, options.instance_name)
        context = TaskContext.get()
        waiting: list[Arrival] = []
        with Loader(target, 0 if context is None else context.partitionId()) as loader:
            for batch in iterator:
                for start in range(0, batch.num_rows, BATCH_MAX):
                    arrivals = list(_arrivals(rows_of(batch.slice(start, BATCH_MAX)), examiner, refused))
                    waiting += [one for one, _ in loader.append(arrivals)]
            in_vain = _again(loader, waiting)
        return Written(len(refused) + len(in_vain), tuple([*refused, *in_vain][:REASONS_MAX]))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """`InputError` if rows were not stored, unless that was asked for. What was stored stays."""
        written = [one for one in messages if isinstance(one, Written)]
        count = sum(one.rejects for one in written)
        if count and not self.options.ignore_rejects:
            reasons = [reason for one in written for reason in one.reasons]
            raise InputError(f"{count} events were not stored: {'; '.join(reasons[:REASONS_MAX])}")


def _arrivals(rows: Iterator[dict[str, Any]], examiner: Examiner, refused: list[str]) -> Iterator[Arrival]:
    """Those that are well; what is wrong with the others goes to ``refused``."""
    for row in rows:
        given = given_of_row(row)
        event = examiner.parsed(given)
        if isinstance(event, Event):
            yield Arrival(Incoming(event, given.origin, given.state_before), 0)  # type: ignore[arg-type]  # ids of events
        else:
            refused.append(f"{event.event_id}: {event.reason}")


def _again(loader: Loader, waiting: list[Arrival]) -> list[str]:
    """Append until nothing more gets stored; why the rest is not."""
    while waiting:
        failed = loader.append(waiting)
        if len(failed) == len(waiting):
            return [f"{result.event_id}: {result.reason or result.outcome}" for _, result in failed]
        waiting = [one for one, _ in failed]
    return []
