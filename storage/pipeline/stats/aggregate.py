"""`statistics`: count the contents of a store on Spark, as Parquet and as a page with plots.

  counts/     events and bytes by room, type, and day: the source of the other sums
  rooms/      each room: its events, bytes, merges, and its current state and forward extremities
  types/      events and bytes per type
  days/       events sent and received per day; ``months/`` the same per month
  index.html  the same for people, with plots; it loads nothing from elsewhere

Tasks share the events as those of a batch read do (`RoomEvents`). So a store that is written
meanwhile is counted at one moment. Only sums go to Spark: Postgres aggregates each range, and
counts the stored bytes without decoding them.

The day of sending is the sender's claim. If it is before 2014, or later than a day after receipt,
it counts as unknown (null).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from importlib.util import find_spec
from typing import Any, Final, LiteralString

import orjson
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from storage.config import Config
from storage.database.arrow_results import arrow_snapshot
from storage.database.columns import PREV_NIDS
from storage.database.placeholders import compose, fill
from storage.errors import ExtraMissing
from storage.pipeline.file_systems import opened
from storage.pipeline.imports.lines import literal
from storage.pipeline.session import executor_errors
from storage.pipeline.source.filters import Options, room_numbers, split
from storage.pipeline.source.reader import EventReader, ReadRange
from storage.pipeline.source.rows import decoded, spark_ddl
from storage.pipeline.source.token_bounds import SQL_FIRST_NUMBER, SQL_FIRST_ROOM, filled

SQL_COUNTS_OF_RANGE: Final[LiteralString] = compose(
    """
WITH counted AS (
    SELECT
        e.room_nid,
        e.type_nid,
        CASE
            WHEN e.origin_server_ts >= 1388534400000
                AND e.origin_server_ts < e.received_ts + 86400000
            THEN (e.origin_server_ts / 86400000)::int
        END AS sent_day,
        (e.received_ts / 86400000)::int AS received_day,
        count(*) AS events,
        count(*) FILTER (WHERE e.state_key_nid IS NOT NULL) AS state_events,
        count(*) FILTER (WHERE e.outlier) AS outliers,
        count(*) FILTER (WHERE e.backfilled) AS backfilled,
        count(*) FILTER (WHERE e.rejected IS NOT NULL) AS rejected,
        count(*) FILTER (WHERE e.soft_failed) AS soft_failed,
        count(*) FILTER (WHERE e.redacted_by IS NOT NULL OR e.redacted_form) AS redacted,
        count(*) FILTER (WHERE cardinality(:prev_nids.call(e)) > 1) AS merges,
        sum(octet_length(e.json))::bigint AS bytes
    FROM events e
    LEFT JOIN unnest($3::bigint[], $4::bool[], $5::bigint[], $6::bigint[]) AS b (writer_nid,
        backfilled, after_id, upto_id)
        ON b.writer_nid = e.writer_nid AND b.backfilled = e.backfilled
    WHERE e.event_nid >= $1::bigint AND e.event_nid < $2::bigint
        AND (e.outlier OR (e.stream_ordering > b.after_id AND e.stream_ordering <= b.upto_id))
    GROUP BY 1, 2, 3, 4
)
SELECT
    r.room_id,
    t.type,
    c.sent_day,
    c.received_day,
    c.events,
    c.state_events,
    c.outliers,
    c.backfilled,
    c.rejected,
    c.soft_failed,
    c.redacted,
    c.merges,
    c.bytes
FROM counted c
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
""",
    PREV_NIDS,
).sql

SQL_ROOMS_NOW: Final[LiteralString] = """
SELECT
    r.room_id,
    r.room_version,
    r.joined_count::bigint AS joined,
    cardinality(r.forward_extremities)::bigint AS forward_extremities,
    COALESCE(g.entry_count, 0)::bigint AS state_entries
FROM rooms r
LEFT JOIN state_groups g ON g.state_group = r.current_state_group
WHERE r.room_nid >= $1::bigint AND r.room_nid < $2::bigint
"""

SQL_ROOM_NAMES: Final[LiteralString] = fill("""
SELECT r.room_id, e.event_id, e.json
FROM rooms r
JOIN current_state c ON c.room_nid = r.room_nid AND c.state_key_nid = {KEY_NAME}
JOIN events e ON e.event_nid = c.event_nid
WHERE r.room_id = ANY($1::text[]) AND e.redacted_by IS NULL AND NOT e.redacted_form
""")

BY: Final = pa.schema(
    [
        ("room_id", pa.string()),
        ("type", pa.string()),
        ("sent_day", pa.int32()),
        ("received_day", pa.int32()),
    ]
)
SUMS: Final = (
    "events",
    "state_events",
    "outliers",
    "backfilled",
    "rejected",
    "soft_failed",
    "redacted",
    "merges",
    "bytes",
)
COUNTS: Final = pa.schema([*BY, *((name, pa.int64()) for name in SUMS)])
ROOMS_NOW: Final = pa.schema(
    [
        ("room_id", pa.string()),
        ("room_version", pa.string()),
        ("joined", pa.int64()),
        ("forward_extremities", pa.int64()),
        ("state_entries", pa.int64()),
    ]
)

NUMBERS_PER_STATEMENT: Final = 100_000
ROOMS_PER_STATEMENT: Final = 10_000
PARTITIONS: Final = 8
TOP: Final = 10
DAYS_SHOWN: Final = 92

Row = Mapping[str, Any]
Read = Callable[[Any], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The content of the page.

    Rows are the first of those in the tables of the same name; ``totals``: sums over everything.
    ``days``: the last `DAYS_SHOWN` with events; ``months``: all. A day or month is a text, None
    where it is unknown. Rooms also have a ``name``, None if they have none.
    """

    totals: Mapping[str, int]
    types: Sequence[Row]
    months: Sequence[Row]
    days: Sequence[Row]
    largest_rooms: Sequence[Row]
    largest_states: Sequence[Row]
    most_forked: Sequence[Row]


@executor_errors()
def statistics(
    spark: SparkSession,
    dsn: str,
    path: str,
    *,
    top: int = TOP,
    partitions: int = PARTITIONS,
    stage: Callable[[str], None] = lambda _: None,
) -> Statistics:
    """Count the contents of the store; write the tables and the page below ``path``.

    Existing files are overwritten. At most ``partitions`` tasks read at once, with one connection
    each. ``top``: rooms of each list, and types. ``stage`` is called with the name of each stage.
    Raise `InputError` if no store was ever opened, `ExtraMissing`, or `DatabaseError`.
    """
    check_plots()
    folder = path.rstrip("/")
    stage("counting")
    _write_counts(spark, dsn, folder, partitions)
    stage("adding up")
    _write_sums(spark, dsn, folder, partitions)
    totals = _totals(spark, dsn, folder, top)
    stage("drawing")
    _write_page(totals, folder)
    return totals


def check_plots() -> None:
    """Raise `ExtraMissing` unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise ExtraMissing("drawing", "spark")


# ------------------------------------------------------------------------------------------------
# count


def _write_counts(spark: SparkSession, dsn: str, folder: str, partitions: int) -> None:
    ranges = EventReader(Options(dsn, partitions=partitions)).partitions()
    sums = [f.sum(name).alias(name) for name in SUMS]
    counted = (
        _read(spark, ranges, partial(counts_of, dsn, config=Config.from_env()), COUNTS)
        .groupBy(*BY.names)
        .agg(*sums)
    )
    _date(_date(counted, "sent_day"), "received_day").write.mode("overwrite").parquet(
        folder + "/counts"
    )


def counts_of(
    dsn: str, span: ReadRange, *, config: Config | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield `COUNTS` of a range, in parts to be summed."""
    with arrow_snapshot(dsn, config=config) as conn:
        pages = filled(conn, SQL_FIRST_NUMBER, span.begin, span.end, NUMBERS_PER_STATEMENT)
        for first, end in pages:
            yield from (
                conn.table(SQL_COUNTS_OF_RANGE, first, end, *span.bounds.columns())
                .cast(COUNTS)
                .to_batches()
            )


def _write_sums(spark: SparkSession, dsn: str, folder: str, partitions: int) -> None:
    counts = _table(spark, folder, "counts").cache()
    try:
        rooms = (
            _rooms_now(spark, dsn, partitions)
            .join(_summed(counts, f.col("room_id")), "room_id", "left")
            .fillna(0, list(SUMS))
        )
        rooms.write.mode("overwrite").parquet(folder + "/rooms")
        _summed(counts, f.col("type")).write.mode("overwrite").parquet(folder + "/types")
        _growth(counts, "day").write.mode("overwrite").parquet(folder + "/days")
        _growth(counts, "month").write.mode("overwrite").parquet(folder + "/months")
    finally:
        counts.unpersist()


def _rooms_now(spark: SparkSession, dsn: str, partitions: int) -> DataFrame:
    with arrow_snapshot(dsn) as conn:
        ranges = list(split(*room_numbers(conn), partitions))
    config = Config.from_env()

    def read(span: tuple[int, int]) -> Iterator[pa.RecordBatch]:
        with arrow_snapshot(dsn, config=config) as conn:
            for first, end in filled(conn, SQL_FIRST_ROOM, *span, ROOMS_PER_STATEMENT):
                yield from conn.table(SQL_ROOMS_NOW, first, end).cast(ROOMS_NOW).to_batches()

    return _read(spark, ranges, read, ROOMS_NOW)


def _read(
    spark: SparkSession, ranges: Sequence[Any], of_span: Read, schema: pa.Schema
) -> DataFrame:
    """Read the rows of all ranges, one task each."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for index in batch.column(0).to_pylist():
                yield from of_span(ranges[index])

    return spark.range(0, len(ranges), 1, max(len(ranges), 1)).mapInArrow(read, spark_ddl(schema))


def _date(frame: DataFrame, name: str) -> DataFrame:
    """Turn a number of days since 1970 into a date."""
    return frame.withColumn(name, f.date_add(f.lit("1970-01-01").cast("date"), f.col(name)))


def _summed(counts: DataFrame, by: Column) -> DataFrame:
    return counts.groupBy(by).agg(*(f.sum(name).alias(name) for name in SUMS))


def _growth(counts: DataFrame, unit: str) -> DataFrame:
    """Return events and bytes sent and received, by day or by the first day of the month."""

    def by(name: str) -> DataFrame:
        moment = f.col(f"{name}_day")
        dated = counts.groupBy((moment if unit == "day" else f.trunc(moment, unit)).alias(unit))
        others = [
            f.lit(0).cast("bigint").alias(f"{other}_{what}")
            for other in ("sent", "received")
            if other != name
            for what in GROWTH
        ]
        return dated.agg(*(f.sum(what).alias(f"{name}_{what}") for what in GROWTH), *others)

    columns = [f"{name}_{what}" for name in ("sent", "received") for what in GROWTH]
    both = reduce(DataFrame.unionByName, [by("sent"), by("received")])
    return both.groupBy(unit).agg(*(f.sum(name).alias(name) for name in columns)).orderBy(unit)


GROWTH: Final = ("events", "bytes")


# ------------------------------------------------------------------------------------------------
# results


def _table(spark: SparkSession, folder: str, name: str) -> DataFrame:
    return spark.read.parquet(literal(folder) + "/" + name)


def _totals(spark: SparkSession, dsn: str, folder: str, top: int) -> Statistics:
    rooms, types, months, days = (
        _table(spark, folder, name) for name in ("rooms", "types", "months", "days")
    )
    sums = (
        types.agg(*(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in SUMS))
        .collect()[0]
        .asDict()
    )

    def first(frame: DataFrame, *order: str) -> list[dict[str, Any]]:
        keys = [f.desc(name) for name in order[:-1]] + [f.asc(order[-1])]
        return _as_dicts(frame.orderBy(*keys).limit(top).collect())

    lists = [
        first(rooms, "events", "room_id"),
        first(rooms, "state_entries", "room_id"),
        first(
            rooms.where("merges > 0 OR forward_extremities > 1"),
            "merges",
            "forward_extremities",
            "room_id",
        ),
    ]
    names = _names(dsn, sorted({row["room_id"] for rows in lists for row in rows}))
    return Statistics(
        {"rooms": rooms.count(), "types": types.count(), **sums},
        first(types, "events", "type"),
        _as_dicts(months.orderBy("month").collect()),
        _as_dicts(days.where("day IS NOT NULL").orderBy(f.desc("day")).limit(DAYS_SHOWN).collect())[
            ::-1
        ],
        *([{"name": names.get(row["room_id"]), **row} for row in rows] for rows in lists),
    )


def _as_dicts(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return rows of Spark as dicts, days as text."""
    dicts = [row.asDict() for row in rows]
    return [
        {
            key: value.isoformat() if hasattr(value, "isoformat") else value
            for key, value in row.items()
        }
        for row in dicts
    ]


def _names(dsn: str, room_ids: list[str]) -> dict[str, str]:
    if not room_ids:
        return {}
    with arrow_snapshot(dsn) as conn:
        rows = decoded(conn, conn.table(SQL_ROOM_NAMES, room_ids), "json").to_pylist()
    names = {row["room_id"]: orjson.loads(row["json"])["content"].get("name") for row in rows}
    return {room_id: name for room_id, name in names.items() if isinstance(name, str) and name}


def _write_page(totals: Statistics, folder: str) -> None:
    # imported here: it needs matplotlib
    from storage.pipeline.stats.html import page  # noqa: PLC0415

    where, inner = opened(folder)
    where.create_dir(inner, recursive=True)
    with where.open_output_stream(f"{inner}/index.html") as file:
        file.write(page(totals).encode())
