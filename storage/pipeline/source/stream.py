"""The streams of events as a source of Structured Streaming.

Offsets are stream tokens, as those of /sync.

  {"token": "s1~4f2a90c1~backfill.3~events.53.main-60~9c3ab84e"}

The tokens alone determine the events between them (`storage.pipeline.source.token_bounds`). So a
query that restarts from its checkpoint reads the same events again for an unfinished batch, and
continues after a finished one. It misses nothing and repeats nothing. If the database was restored,
and a batch has read events that are now lost, the query ends with `ResyncNeeded`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from storage.database.arrow_results import ArrowConnection, arrow_snapshot
from storage.pipeline.source.filters import Chosen, Options, by_position, nth_position, split
from storage.pipeline.source.rows import read_rows
from storage.pipeline.source.token_bounds import (
    Bounds,
    between,
    current,
    cut,
    deployment_of,
    lost_positions,
    token_of,
)
from storage.streams import SyncToken


@dataclass
class StreamPartition(InputPartition):
    """The range that one task reads: stream orderings from ``begin`` to before ``end``.

    Only events within the bounds are included.
    """

    begin: int
    end: int
    bounds: Bounds


class EventStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. It starts at the option ``since``, or with the first event ever."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._target: SyncToken | None = None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Record the current position: a query with the trigger availableNow ends there.

        It reads up to there in batches of `getDefaultReadLimit`.
        """
        with arrow_snapshot(self.options.dsn, config=self.options.config) as conn:
            self._target = current(conn)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return where a query without a checkpoint starts."""
        with arrow_snapshot(self.options.dsn, config=self.options.config) as conn:
            deployment = deployment_of(conn)
            since = (
                SyncToken()
                if self.options.since is None
                else token_of(conn, self.options.since, deployment)
            )
            return _offset(since, deployment)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return the option ``maxEventsPerBatch``."""
        most = self.options.max_events_per_batch
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(  # noqa: N802  # Spark's name
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        """Return the end of the next batch: the streams' position, or the limit if earlier.

        With the trigger availableNow it is the position at which the query began.
        """
        with arrow_snapshot(self.options.dsn, config=self.options.config) as conn:
            deployment = deployment_of(conn)
            begin = token_of(conn, start["token"], deployment)
            end = current(conn) if self._target is None else self._target
            if isinstance(limit, ReadMaxRows):
                last = nth_position(conn, between(conn, begin, end), limit.max_rows)
                end = end if last is None else cut(begin, end, last, lost_positions(conn))
            return _offset(end, deployment)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return ranges of the stream between two offsets."""
        with arrow_snapshot(self.options.dsn, config=self.options.config) as conn:
            bounds = _bounds(conn, start, end)
        if not bounds.parts:
            return []
        return [
            StreamPartition(begin, stop, bounds)
            for begin, stop in split(bounds.after + 1, bounds.upto, self.options.partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the events of a range, in stream order."""
        assert isinstance(partition, StreamPartition)  # noqa: S101  # what `partitions` gave
        with arrow_snapshot(self.options.dsn, config=self.options.config) as conn:
            for nids in by_position(
                conn, partition.begin, partition.end, partition.bounds, Chosen()
            ):
                yield from read_rows(conn, nids, self.options.columns)


def _bounds(conn: ArrowConnection, start: dict[str, Any], end: dict[str, Any]) -> Bounds:
    deployment = deployment_of(conn)
    return between(conn, *(token_of(conn, offset["token"], deployment) for offset in (start, end)))


def _offset(token: SyncToken, deployment: str) -> dict[str, Any]:
    return {"token": token.print(deployment)}
