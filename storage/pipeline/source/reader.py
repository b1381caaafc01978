"""`RoomEvents`: the events of a store as a data source of Spark, format "room_events".

  spark.dataSource.register(RoomEvents)
  spark.read.format("room_events").option("dsn", dsn).load()

A batch read returns the events that were committed when it was planned. Tasks share the event nids
in ranges, and each omits events that the position of that moment does not cover. The columns are
those of the schema or of the option ``columns``; others are not fetched. A Python source of Spark
does not learn which columns a query uses. With the option ``pushdown`` Postgres applies the filters
of `storage.pipeline.source.filters.Chosen`. Those on id, room, stream_ordering and received_ts use
an index: a task reads only the events that pass them. Set
``spark.sql.python.filterPushdown.enabled`` as well: without it Spark refuses a source that takes
filters. With ``partition_by`` a task has whole rooms, or whole days
(`storage.pipeline.source.reader`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, LiteralString

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from storage.config import Config
from storage.database.arrow_results import ArrowConnection, arrow_snapshot
from storage.pipeline.imports.stage_rows import EventWriter
from storage.pipeline.source.filters import (
    ALL,
    SQL_BY_INDEX,
    Chosen,
    Options,
    Range,
    Select,
    both,
    by_id,
    by_number,
    by_position,
    by_receipt,
    by_room,
    by_room_number,
    numbers,
    outliers_of,
    room_numbers,
    split,
    taken,
)
from storage.pipeline.source.rows import ddl, read_rows
from storage.pipeline.source.stream import EventStream
from storage.pipeline.source.token_bounds import Bounds, between, current, deployment_of, token_of
from storage.streams import SyncToken

# --------------------------------------------------------------------------------------------------
# How a read is divided among tasks by the option ``partition_by``: whole rooms, or whole days.
#
#   partition_by=room   task 0: rooms 1 to 7    task 1: room 8    task 2: rooms 9 to 400
#   partition_by=day    task 0: 1 to 3 May      task 1: 4 May     task 2: 5 to 31 May
#
# Tasks get about the same number of events. The number of a room's events is taken from its largest
# topological position, which costs one pass over `rooms`; that of a day is counted, which costs one
# pass over `events`, or over the blocks that may have events of the period.

DAY_MS: Final = 86_400_000

SQL_ROOM_PARTS: Final[LiteralString] = """
WITH sized AS (
    SELECT room_nid, GREATEST(max_topological_ordering, 1) AS size
    FROM rooms
),
placed AS (
    SELECT room_nid, sum(size) OVER (ORDER BY room_nid) - size AS before, sum(size) OVER () AS total
    FROM sized
)
SELECT min(room_nid)::bigint AS first, max(room_nid)::bigint AS last
FROM placed
GROUP BY floor(before * $1::bigint / total)
ORDER BY first
"""

SQL_RECEIPTS: Final[LiteralString] = """
SELECT COALESCE(min(received_ts), 0)::bigint AS first,
    COALESCE(max(received_ts), -1)::bigint AS last
FROM events
WHERE received_ts BETWEEN $1::bigint AND $2::bigint
"""

SQL_DAYS: Final[LiteralString] = """
SELECT floor(received_ts / $3::numeric)::bigint AS day, count(*) AS events,
    min(received_ts) AS first, max(received_ts) AS last
FROM events
WHERE received_ts BETWEEN $1::bigint AND $2::bigint
GROUP BY day
ORDER BY day
"""


def received_between(conn: ArrowConnection, period: Range) -> Range:
    """Return the first and last time of receipt in a period; an empty range if there is none.

    It reads the blocks that may have events of the period.
    """
    conn.execute(SQL_BY_INDEX)
    [row] = conn.rows(SQL_RECEIPTS, *period)
    return Range(row["first"], row["last"])


def room_parts(conn: ArrowConnection, parts: int) -> list[tuple[int, int]]:
    """Return at most so many ranges of room nids (begin, end); they cover all rooms."""
    rows = conn.rows(SQL_ROOM_PARTS, parts)
    return [(row["first"], row["last"] + 1) for row in rows]


def day_parts(conn: ArrowConnection, parts: int, within: Range = ALL) -> list[tuple[int, int]]:
    """Return at most so many ranges of times of receipt (begin, end), in ms.

    They begin at midnight (UTC), or where ``within`` does, and cover all events there.
    """
    if within != ALL:
        conn.execute(SQL_BY_INDEX)
    days = conn.rows(SQL_DAYS, *within, DAY_MS)
    if not days:
        return []
    total = sum(row["events"] for row in days)
    begins: dict[int, int] = {}
    before = 0
    for row in days:
        begins.setdefault(before * parts // total, row["day"])
        before += row["events"]
    starts = [max(day * DAY_MS, days[0]["first"]) for day in begins.values()]
    return list(zip(starts, [*starts[1:], days[-1]["last"] + 1], strict=True))


# --------------------------------------------------------------------------------------------------
# Redact DSNs, which may contain passwords, in everything that Spark shows and keeps.
#
# That is plans, the event log and the history server. Spark redacts the values of options whose
# names match one setting, and text of plans that matches another. The options of a view or a table
# are part of plans, and the event log has a plan for each statement.

NAMES: Final = "spark.sql.redaction.options.regex"
TEXTS: Final = "spark.sql.redaction.string.regex"
NAME: Final = "(?i)^dsn$"
TEXT: Final = r"(?i)postgres(?:ql)?://[^\s'\",)\]}]+"


def redact_dsns() -> None:
    """Make the active session redact DSNs, in addition to its other patterns.

    Without a session, as in an executor, do nothing.
    """
    spark = SparkSession.getActiveSession()
    if spark is None:
        return
    for setting, pattern in ((NAMES, NAME), (TEXTS, TEXT)):
        redaction = spark.conf.get(setting, None)
        if redaction is None or pattern not in redaction:
            spark.conf.set(setting, f"{redaction}|{pattern}" if redaction else pattern)


Kind = Literal["numbers", "positions", "outliers", "receipts", "rooms", "room numbers", "ids"]
SELECT: Final[Mapping[Kind, Select]] = {
    "numbers": by_number,
    "positions": by_position,
    "outliers": outliers_of,
    "receipts": by_receipt,
    "rooms": by_room,
    "room numbers": by_room_number,
    "ids": by_id,
}
Ranges = Mapping[Kind, Range]
"""The ranges to read, by kind."""

NO_TIME: Final = Range(0, -1)


@dataclass
class ReadRange(InputPartition):
    """The range that one task reads, from ``begin`` to before ``end``.

    By ``kind``: event nids, stream orderings, room nids with outliers, times of receipt, indexes of
    chosen rooms or events, or room nids.
    """

    begin: int
    end: int
    bounds: Bounds
    kind: Kind


class RoomEvents(DataSource):
    """The data source. Options: `storage.pipeline.source.filters.Options`."""

    config: Config | None = None

    @classmethod
    def name(cls) -> str:
        """Return the format's name.

        `register` calls this on the driver: from then on the session redacts DSNs.
        """
        redact_dsns()
        return "room_events"

    @classmethod
    def with_config(cls, config: Config) -> type["RoomEvents"]:
        """Return the data source to register for this config.

        Executors use it; otherwise they use the environment of the driver's JVM.
        """
        return type("RoomEvents", (cls,), {"config": config})

    def schema(self) -> str:
        """Return the requested columns, all without the option ``columns``."""
        return ddl(Options.of(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of one batch."""
        options = self._options_of(schema)
        return FilteringReader(options) if options.pushdown else EventReader(options)

    def streamReader(  # noqa: N802  # Spark's name
        self, schema: StructType
    ) -> DataSourceStreamReader:
        """Return a reader that follows the streams of events."""
        return EventStream(self._options_of(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return a writer that appends events; refuse ``overwrite``."""
        return EventWriter(self._options(), schema.fieldNames(), overwrite=overwrite)

    def _options(self) -> Options:
        options = Options.of(self.options)
        return options if self.config is None else replace(options, config=self.config)

    def _options_of(self, schema: StructType) -> Options:
        """Return the options, with the columns of the schema of the read."""
        options = self._options()
        return replace(
            options,
            columns=Options.of(
                {"dsn": options.dsn, "columns": ",".join(schema.fieldNames())}
            ).columns,
        )


class EventReader(DataSourceReader):
    """One batch read."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.chosen: Chosen = Chosen()

    def partitions(self) -> Sequence[InputPartition]:
        """Return the ranges of tasks: by filters, else of nids, or after a token of positions."""
        options = self.options
        self.chosen = replace(self.chosen, outliers=options.outliers)
        with arrow_snapshot(options.dsn, config=options.config) as conn:
            deployment = deployment_of(conn)
            since = (
                SyncToken() if options.since is None else token_of(conn, options.since, deployment)
            )
            upto = (
                current(conn) if options.upto is None else token_of(conn, options.upto, deployment)
            )
            bounds = between(conn, since, upto)
            parts = self._parts(conn, bounds)
        return [ReadRange(begin, end, bounds, kind) for kind, begin, end in parts]

    def _parts(self, conn: ArrowConnection, bounds: Bounds) -> list[tuple[Kind, int, int]]:
        """Return the ranges of all tasks, by the option ``partition_by`` if it is given."""
        chosen, by, most = self.chosen, self.options.partition_by, self.options.partitions
        if by is not None and chosen.event_id is not None:
            most = 1  # so the task has whole rooms and days
        elif by == "room" and chosen.room_id is None:
            return [("room numbers", *part) for part in room_parts(conn, most)]
        elif by == "day":
            return [("receipts", *part) for part in day_parts(conn, most, chosen.received_ts)]
        ranges = self._chosen_ranges(conn, bounds) or self._all_ranges(conn, bounds)
        period = ranges.get("receipts", NO_TIME)
        if period.last - period.first > most * DAY_MS:  # of which a wrong clock may be the reason
            return [("receipts", *part) for part in day_parts(conn, most, period)]
        return [
            (kind, begin, end)
            for kind, (first, last) in ranges.items()
            for begin, end in split(first, last, most if kind != "outliers" else 1)
        ]

    def _chosen_ranges(self, conn: ArrowConnection, bounds: Bounds) -> Ranges:
        """Return the ranges that an index finds; nothing without a filter that can use one."""
        chosen = self.chosen
        if chosen.event_id is not None:
            return {"ids": Range(0, len(chosen.event_id) - 1)}
        if chosen.room_id is not None:
            return {"rooms": Range(0, len(chosen.room_id) - 1)}
        if chosen.stream_ordering != ALL:
            return {"positions": both(chosen.stream_ordering, Range(bounds.after + 1, bounds.upto))}
        if chosen.received_ts != ALL:
            return {"receipts": received_between(conn, chosen.received_ts)}
        return {}

    def _all_ranges(self, conn: ArrowConnection, bounds: Bounds) -> Ranges:
        if self.options.since is None and self.options.outliers:
            return {"numbers": Range(*numbers(conn))}
        positions: dict[Kind, Range] = {"positions": Range(bounds.after + 1, bounds.upto)}
        return (
            {**positions, "outliers": Range(*room_numbers(conn))}
            if self.options.outliers
            else positions
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the events of a range.

        There are none where `partitions` found nothing to read: Spark then adds a partition of its
        own.
        """
        if not isinstance(partition, ReadRange):
            return
        with arrow_snapshot(self.options.dsn, config=self.options.config) as conn:
            for nids in SELECT[partition.kind](
                conn, partition.begin, partition.end, partition.bounds, self.chosen
            ):
                yield from read_rows(conn, nids, self.options.columns)


class FilteringReader(EventReader):
    """One batch read that takes filters of the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Keep the filters that Postgres applies; return the others to Spark."""
        self.chosen, left = taken(filters, self.chosen)
        return left
