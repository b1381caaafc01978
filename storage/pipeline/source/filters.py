"""Which events a task reads: filters for Postgres, ranges of tasks, and nids in each range.

If a filter selects events, rooms, stream orderings or times of receipt, a task finds its events by
the index for these. That of times of receipt names ranges of blocks, which are then read. The other
filters are applied to the result, in Postgres as well.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, LiteralString, NamedTuple, Self

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringEndsWith,
    StringStartsWith,
)

from storage.arguments import is_text
from storage.config import Config
from storage.database.arrow_results import ArrowConnection
from storage.database.placeholders import fill
from storage.errors import InputError
from storage.pipeline.source.rows import COLUMNS
from storage.pipeline.source.token_bounds import (
    SQL_FIRST_NUMBER,
    SQL_FIRST_POSITION,
    SQL_FIRST_ROOM,
    Bounds,
    filled,
)

PART_EVENTS: Final[LiteralString] = """
SELECT e.event_nid
FROM events e
"""
PART_EVENTS_OF_PERIOD: Final[LiteralString] = """
SELECT e.event_nid
FROM (
    SELECT * FROM events
    WHERE received_ts >= $25::bigint AND received_ts < $27::bigint
    OFFSET 0
) AS e
"""
"""Before ANALYZE, Postgres would take the index of stream orderings, which has all events."""

PART_EVENTS_OF_ROOMS: Final[LiteralString] = """
SELECT e.event_nid
FROM rooms r
CROSS JOIN LATERAL (
    SELECT * FROM events WHERE room_nid = r.room_nid AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = r.room_nid AND outlier AND $9::boolean
    OFFSET 0
) AS e
"""
PART_EVENTS_OF_IDS: Final[LiteralString] = """
SELECT e.event_nid
FROM unnest($25::text[]) AS wanted (event_id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.event_id OFFSET 0) AS e
"""
PART_FILTERED: Final[LiteralString] = """
LEFT JOIN unnest($1::bigint[], $2::bool[], $3::bigint[], $4::bigint[]) AS b (writer_nid, backfilled,
    after_id, upto_id)
    ON b.writer_nid = e.writer_nid AND b.backfilled = e.backfilled
WHERE ((e.stream_ordering > b.after_id AND e.stream_ordering <= b.upto_id
    AND e.stream_ordering BETWEEN $10::bigint AND $11::bigint)
        OR (e.outlier AND $9::boolean))
    AND ($5::text[] IS NULL
        OR e.room_nid IN (SELECT room_nid FROM rooms WHERE room_id = ANY($5::text[])))
    AND ($6::text[] IS NULL
        OR e.type_nid IN (SELECT type_nid FROM event_types WHERE type = ANY($6::text[])))
    AND ($7::text[] IS NULL
        OR e.sender_nid IN (SELECT principal_nid FROM principals WHERE name = ANY($7::text[])))
    AND ($8::text[] IS NULL OR e.event_id = ANY($8::text[]))
    AND e.received_ts BETWEEN $12::bigint AND $13::bigint
    AND ($14::bigint IS NULL OR e.origin_server_ts BETWEEN $14::bigint AND $15::bigint)
    AND ($16::bigint IS NULL OR e.topological_ordering BETWEEN $16::bigint AND $17::bigint)
    AND ($18::bigint IS NULL
        OR claimed_depth(e.depth, e.topological_ordering) BETWEEN $18::bigint AND $19::bigint)
    AND ($20::boolean IS NULL OR (e.state_key_nid IS NOT NULL) = $20::boolean)
    AND ($21::boolean IS NULL OR e.soft_failed = $21::boolean)
    AND ($22::text[] IS NULL
        OR (SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid)
            = ANY($22::text[]))
    AND ($23::text IS NULL
        OR e.type_nid IN (SELECT type_nid FROM event_types WHERE starts_with(type, $23::text)))
    AND ($24::text IS NULL
        OR (SELECT right(name, length($24::text)) FROM principals
            WHERE principal_nid = e.sender_nid) = $24::text)
"""
"""The condition of every read, whatever its index: `Bounds.columns` and `Chosen.columns`."""

PART_BY_NUMBER: Final[LiteralString] = """
    AND e.event_nid >= $25::bigint AND e.event_nid < $26::bigint
ORDER BY e.event_nid
"""
PART_BY_POSITION: Final[LiteralString] = """
    AND e.stream_ordering >= $25::bigint AND e.stream_ordering < $26::bigint
ORDER BY e.stream_ordering
"""
PART_BY_RECEIPT: Final[LiteralString] = """
    AND (e.received_ts, e.event_nid) > ($25::bigint, $26::bigint)
ORDER BY e.received_ts, e.event_nid
LIMIT $28::bigint
"""
PART_OUTLIERS_BY_ROOM: Final[LiteralString] = """
    AND e.outlier AND e.room_nid >= $25::bigint AND e.room_nid < $26::bigint
ORDER BY e.event_nid
"""
PART_BY_ROOM: Final[LiteralString] = """
    AND r.room_id = ANY($25::text[])
ORDER BY e.event_nid
"""
PART_BY_ROOM_NUMBER: Final[LiteralString] = """
    AND r.room_nid >= $25::bigint AND r.room_nid < $26::bigint
ORDER BY r.room_nid, e.event_nid
"""
PART_BY_ID: Final[LiteralString] = """
ORDER BY e.event_nid
"""

TEMPLATE_NIDS: Final[LiteralString] = """
{events}
{wanted}
{by}
"""

SQL_NIDS_BY_NUMBER: Final[LiteralString] = fill(
    TEMPLATE_NIDS, events=PART_EVENTS, wanted=PART_FILTERED, by=PART_BY_NUMBER
)
SQL_NIDS_BY_POSITION: Final[LiteralString] = fill(
    TEMPLATE_NIDS, events=PART_EVENTS, wanted=PART_FILTERED, by=PART_BY_POSITION
)
SQL_NIDS_BY_RECEIPT: Final[LiteralString] = fill(
    TEMPLATE_NIDS, events=PART_EVENTS_OF_PERIOD, wanted=PART_FILTERED, by=PART_BY_RECEIPT
)
SQL_OUTLIER_NIDS: Final[LiteralString] = fill(
    TEMPLATE_NIDS, events=PART_EVENTS, wanted=PART_FILTERED, by=PART_OUTLIERS_BY_ROOM
)
SQL_NIDS_BY_ROOM: Final[LiteralString] = fill(
    TEMPLATE_NIDS, events=PART_EVENTS_OF_ROOMS, wanted=PART_FILTERED, by=PART_BY_ROOM
)
SQL_NIDS_BY_ROOM_NUMBER: Final[LiteralString] = fill(
    TEMPLATE_NIDS, events=PART_EVENTS_OF_ROOMS, wanted=PART_FILTERED, by=PART_BY_ROOM_NUMBER
)
SQL_NIDS_BY_ID: Final[LiteralString] = fill(
    TEMPLATE_NIDS, events=PART_EVENTS_OF_IDS, wanted=PART_FILTERED, by=PART_BY_ID
)

SQL_BY_INDEX: Final[LiteralString] = """
SET LOCAL enable_bitmapscan = on
"""
"""The index of times of receipt has block ranges, which only a bitmap reads."""

SQL_RECEIVED_TS: Final[LiteralString] = """
SELECT received_ts
FROM events
WHERE event_nid = $1::bigint
"""

SQL_ROOM_NUMBERS: Final[LiteralString] = """
SELECT COALESCE(min(room_nid), 0)::bigint AS first, COALESCE(max(room_nid), 0)::bigint AS last
FROM rooms
"""

SQL_NUMBERS: Final[LiteralString] = """
SELECT COALESCE(min(event_nid), 0) AS first, COALESCE(max(event_nid), 0) AS last
FROM events
"""

SQL_NTH_POSITION: Final[LiteralString] = """
SELECT e.stream_ordering
FROM events e
JOIN unnest($3::bigint[], $4::bool[], $5::bigint[], $6::bigint[]) AS b (writer_nid, backfilled,
    after_id, upto_id)
    ON b.writer_nid = e.writer_nid AND b.backfilled = e.backfilled
WHERE e.stream_ordering > $1::bigint AND e.stream_ordering <= $2::bigint
    AND e.stream_ordering > b.after_id AND e.stream_ordering <= b.upto_id
ORDER BY e.stream_ordering
OFFSET $7::bigint - 1
LIMIT 1
"""

LOWEST: Final = -(2**63)
HIGHEST: Final = 2**63 - 1
RANGE: Final = 20_000
"""Nids covered by one statement."""

SORTED_EVENTS: Final = 50 * RANGE
"""Nids of one statement by time of receipt, which has to read and sort the rest of its part."""

ROOMS_EACH: Final = 100
"""Rooms of one statement."""

Select = Callable[[ArrowConnection, int, int, Bounds, "Chosen"], Iterator[list[int]]]
"""Yields the nids of the events to read, in pages."""


class Range(NamedTuple):
    """Integers from ``first`` to ``last``, both included."""

    first: int = LOWEST
    last: int = HIGHEST

    def take(self, spark_filter: Filter) -> "Range | None":
        """Return the range with this filter, too.

        Return None if it is no comparison with a 64-bit integer.
        """
        value = getattr(spark_filter, "value", None)
        if type(spark_filter) not in COMPARISONS or type(value) is not int:
            return None
        low, high = COMPARISONS[type(spark_filter)]
        first = self.first if low is None else max(self.first, value + low)
        last = self.last if high is None else min(self.last, value + high)
        return Range(first, last) if first <= HIGHEST and last >= LOWEST else None


ALL: Final = Range()

COMPARISONS: Final[Mapping[type[Filter], tuple[int | None, int | None]]] = {
    EqualTo: (0, 0),
    GreaterThan: (1, None),
    GreaterThanOrEqual: (0, None),
    LessThan: (None, -1),
    LessThanOrEqual: (None, 0),
}
"""The offsets from a filter's value to the first and last number that pass; None: unbounded."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Filters that Postgres applies; None: all.

    Spark passes them on as ``room_id = …`` or ``room_id IN (…)``, and so for the others.
    ``stream_ordering`` and the other numbers: ranges, from comparisons. ``has_state_key``: from
    IS NULL and IS NOT NULL. ``type_prefix``, ``sender_suffix``: from LIKE 'm.room.%' and
    LIKE '%:example.org'. ``outliers``: whether outliers are read at all.
    """

    room_id: tuple[str, ...] | None = None
    type: tuple[str, ...] | None = None
    sender: tuple[str, ...] | None = None
    event_id: tuple[str, ...] | None = None
    stream_ordering: Range = ALL
    received_ts: Range = ALL
    origin_server_ts: Range = ALL
    topological_ordering: Range = ALL
    depth: Range = ALL
    has_state_key: bool | None = None
    soft_failed: bool | None = None
    state_key: tuple[str, ...] | None = None
    type_prefix: str | None = None
    sender_suffix: str | None = None
    outliers: bool = True

    def take(self, spark_filter: Filter) -> "Chosen | None":
        """Return the filters with this one, too; None if it is not one of these."""
        if isinstance(spark_filter, Not):
            return self._flag(spark_filter.child, expected=False)
        name = ".".join(getattr(spark_filter, "attribute", ()))
        if isinstance(spark_filter, StringStartsWith | StringEndsWith):
            return self._part(name, spark_filter)
        if isinstance(spark_filter, IsNull | IsNotNull):
            return self._present(name, isinstance(spark_filter, IsNotNull))
        if name == "soft_failed":
            return self._flag(spark_filter, expected=True)
        if name in RANGES:
            current: Range = getattr(self, name)
            narrowed = current.take(spark_filter)
            return None if narrowed is None else self._with(name, narrowed)
        return self._among(name, spark_filter) if name in (*TEXTS, "state_key") else None

    def _flag(self, spark_filter: Filter, *, expected: bool) -> "Chosen | None":
        """Take ``soft_failed = true``, and its negation."""
        if not isinstance(spark_filter, EqualTo) or spark_filter.attribute != ("soft_failed",):
            return None
        value = (spark_filter.value is expected) if isinstance(spark_filter.value, bool) else None
        return None if value is None else self._once("soft_failed", value)

    def _present(self, name: str, is_present: bool) -> "Chosen | None":
        return self._once("has_state_key", is_present) if name == "state_key" else None

    def _part(self, name: str, spark_filter: StringStartsWith | StringEndsWith) -> "Chosen | None":
        kind = {("type", StringStartsWith): "type_prefix", ("sender", StringEndsWith): SUFFIX}
        column = kind.get((name, type(spark_filter)))
        return (
            self._once(column, spark_filter.value)
            if column and is_text(spark_filter.value)
            else None
        )

    def _once(self, name: str, value: object) -> "Chosen | None":
        """Set a value; another value for the same is left to Spark."""
        return self._with(name, value) if getattr(self, name) in (None, value) else None

    def _among(self, name: str, spark_filter: Filter) -> "Chosen | None":
        if not isinstance(spark_filter, EqualTo | In):
            return None
        values = (
            (spark_filter.value,)
            if isinstance(spark_filter, EqualTo)
            else tuple(spark_filter.value)
        )
        if not all(map(is_text, values)):
            return None
        current: tuple[str, ...] | None = getattr(self, name)
        return self._with(
            name,
            values if current is None else tuple(value for value in current if value in values),
        )

    def _with(self, name: str, value: object) -> "Chosen":
        changes: dict[str, Any] = {name: value}
        return replace(self, **changes)

    def columns(self) -> tuple[object, ...]:
        """Return the arguments of `PART_FILTERED`.

        An outlier has no stream ordering, so none passes a comparison with it.
        """
        texts: Iterator[tuple[str, ...] | None] = (getattr(self, name) for name in TEXTS)
        outliers = self.outliers and self.stream_ordering == ALL
        return (
            *(None if values is None else list(values) for values in texts),
            outliers,
            *self.stream_ordering,
            *self.received_ts,
            *_or_nulls(self.origin_server_ts),
            *_or_nulls(self.topological_ordering),
            *_or_nulls(self.depth),
            self.has_state_key,
            self.soft_failed,
            None if self.state_key is None else list(self.state_key),
            self.type_prefix,
            self.sender_suffix,
        )


SUFFIX: Final = "sender_suffix"
TEXTS: Final = ("room_id", "type", "sender", "event_id")
RANGES: Final = (
    "stream_ordering",
    "received_ts",
    "origin_server_ts",
    "topological_ordering",
    "depth",
)


def _or_nulls(span: Range) -> tuple[int | None, int | None]:
    """Return the ends of a range; nulls for all numbers, as a column may be null."""
    return (None, None) if span == ALL else span


def both(one: Range, other: Range) -> Range:
    return Range(max(one.first, other.first), min(one.last, other.last))


def split(first: int, last: int, parts: int) -> Iterator[tuple[int, int]]:
    """Split ``first`` to ``last`` into at most so many ranges (begin, end), end excluded."""
    size = max(-(-(last + 1 - first) // parts), 1)
    for begin in range(first, last + 1, size):
        yield begin, min(begin + size, last + 1)


def by_number(
    conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen
) -> Iterator[list[int]]:
    """Yield nids from ``begin`` to before ``end``, of events within the bounds and of outliers."""
    for first, after in filled(conn, SQL_FIRST_NUMBER, begin, end, RANGE):
        yield _page(conn, SQL_NIDS_BY_NUMBER, bounds, chosen, first, after)


def by_position(
    conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen
) -> Iterator[list[int]]:
    """Yield events with stream orderings from ``begin`` to before ``end`` and within the bounds.

    They come in stream order, in pages.
    """
    for first, after in filled(conn, SQL_FIRST_POSITION, begin, end, RANGE):
        yield _page(conn, SQL_NIDS_BY_POSITION, bounds, chosen, first, after)


def by_receipt(
    conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen
) -> Iterator[list[int]]:
    """Yield events received from ``begin`` (ms) to before ``end``, in bounds, and outliers.

    They come in order of receipt, in pages. Only their nids are held, of `SORTED_EVENTS` events at
    most.
    """
    conn.execute(SQL_BY_INDEX)
    at, nid = begin, -1
    while True:
        nid_rows = conn.table(
            SQL_NIDS_BY_RECEIPT, *bounds.columns(), *chosen.columns(), at, nid, end, SORTED_EVENTS
        )
        for first in range(0, nid_rows.num_rows, RANGE):
            yield _nids(nid_rows.slice(first, RANGE))
        if nid_rows.num_rows < SORTED_EVENTS:
            return
        nid = nid_rows.column(0)[-1].as_py()
        [row] = conn.rows(SQL_RECEIVED_TS, nid)
        at = row["received_ts"]


def by_room(
    conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen
) -> Iterator[list[int]]:
    """Yield the events of chosen rooms, by index in ``chosen``, from ``begin`` to before ``end``.

    Events within the bounds and outliers are included, room by room.
    """
    conn.execute(SQL_BY_INDEX)
    for room_id in (chosen.room_id or ())[begin:end]:
        yield _page(conn, SQL_NIDS_BY_ROOM, bounds, chosen, [room_id])


def by_room_number(
    conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen
) -> Iterator[list[int]]:
    """Yield the events of rooms with nids from ``begin`` to before ``end``, room by room.

    Events within the bounds and outliers are included.
    """
    conn.execute(SQL_BY_INDEX)
    for first, after in filled(conn, SQL_FIRST_ROOM, begin, end, ROOMS_EACH):
        yield _page(conn, SQL_NIDS_BY_ROOM_NUMBER, bounds, chosen, first, after)


def by_id(
    conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen
) -> Iterator[list[int]]:
    """Yield the chosen events within the bounds, and outliers, by index in ``chosen``.

    ``begin`` is included, ``end`` not.
    """
    yield _page(conn, SQL_NIDS_BY_ID, bounds, chosen, list(chosen.event_id or ())[begin:end])


def outliers_of(
    conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen
) -> Iterator[list[int]]:
    """Yield outliers of rooms with nids from ``begin`` to before ``end``; ignore the bounds."""
    yield _page(conn, SQL_OUTLIER_NIDS, bounds, chosen, begin, end)


def room_numbers(conn: ArrowConnection) -> tuple[int, int]:
    """Return the smallest and the largest nid of a room; 0, 0 if there is none."""
    [row] = conn.rows(SQL_ROOM_NUMBERS)
    return row["first"], row["last"]


def numbers(conn: ArrowConnection) -> tuple[int, int]:
    """Return the smallest and the largest nid of an event; 0, 0 if there is none."""
    [row] = conn.rows(SQL_NUMBERS)
    return row["first"], row["last"]


def nth_position(conn: ArrowConnection, bounds: Bounds, count: int) -> int | None:
    """Return the stream ordering of the ``count``-th event; None if there are fewer."""
    rows = conn.rows(SQL_NTH_POSITION, bounds.after, bounds.upto, *bounds.columns(), count)
    return rows[0]["stream_ordering"] if rows else None


def _page(
    conn: ArrowConnection,
    statement: LiteralString,
    bounds: Bounds,
    chosen: Chosen,
    *part: int | list[str],
) -> list[int]:
    """Return the nids that pass all filters, of one part of the events."""
    return _nids(conn.table(statement, *bounds.columns(), *chosen.columns(), *part))


def _nids(table: Any) -> list[int]:
    nids: list[int] = table.column(0).to_pylist()
    return nids


def taken(filters: Iterable[Filter], chosen: Chosen) -> tuple[Chosen, list[Filter]]:
    """Return the filters that Postgres applies, and those left to Spark."""
    left: list[Filter] = []
    for spark_filter in filters:
        more = chosen.take(spark_filter)
        if more is None:
            left.append(spark_filter)
        else:
            chosen = more
    return chosen, left


# --------------------------------------------------------------------------------------------------
# The options of the data source: Spark's texts as typed values.


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the format `room_events`.

    ``dsn``: the database. ``columns``: only these, separated by commas. ``partitions``: tasks of a
    read, each with one connection at a time. ``partition_by``: "room" gives each task whole rooms,
    "day" whole days of receipt (UTC). ``pushdown``: "true" lets Postgres filter. ``since``,
    ``upto``: tokens; only events between them are read. ``outliers``: whether to read outliers
    (default: only without ``since``). ``maxEventsPerBatch``: of a streaming read. ``server_name``,
    ``room_version``: of a write, as in `storage.open` and `Store.append`. ``instance_name``: tasks
    write under this name and their number. ``rejects``: "fail" (the default) or "ignore" events
    that cannot be stored. ``config``: no option; the limits and settings of the driver, which go to
    the executors.
    """

    dsn: str = field(repr=False)  # it may contain a password
    columns: tuple[str, ...] = COLUMNS
    partitions: int = 8
    partition_by: Literal["room", "day"] | None = None
    pushdown: bool = False
    since: str | None = None
    upto: str | None = None
    outliers: bool = True
    max_events_per_batch: int | None = None
    server_name: str | None = None
    room_version: str | None = None
    instance_name: str = "spark"
    ignore_rejects: bool = False
    config: Config = field(default_factory=Config.from_env)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Parse the options as given to Spark, where the case of names does not matter.

        Raise `InputError` with the defect.
        """
        by_name = {name.lower(): value for name, value in options.items()}
        unknown = by_name.keys() - OPTION_NAMES
        if unknown:
            raise InputError(
                f"room_events has no option {', '.join(sorted(unknown))}:"
                f" it has {', '.join(sorted(OPTION_NAMES))}"
            )
        if "dsn" not in by_name:
            raise InputError("room_events needs the option dsn: postgresql://…")
        batch = by_name.get("maxeventsperbatch")
        return cls(
            by_name["dsn"],
            columns=_columns(by_name.get("columns")),
            partitions=_positive("partitions", by_name.get("partitions", "8")),
            partition_by=_partition_by(by_name.get("partition_by")),
            pushdown=_truth("pushdown", by_name.get("pushdown", "false")),
            since=by_name.get("since"),
            upto=by_name.get("upto"),
            outliers=_truth(
                "outliers", by_name.get("outliers", "false" if "since" in by_name else "true")
            ),
            max_events_per_batch=None if batch is None else _positive("maxEventsPerBatch", batch),
            server_name=by_name.get("server_name"),
            room_version=by_name.get("room_version"),
            instance_name=by_name.get("instance_name", "spark"),
            ignore_rejects=_one_of("rejects", by_name.get("rejects", "fail"), ("fail", "ignore"))
            == "ignore",
        )


OPTION_NAMES: Final = frozenset(
    [
        "dsn",
        "columns",
        "partitions",
        "partition_by",
        "since",
        "upto",
        "outliers",
        "pushdown",
        "maxeventsperbatch",
        "server_name",
        "room_version",
        "instance_name",
        "rejects",
        "path",
    ]
)


def _columns(text: str | None) -> tuple[str, ...]:
    names = COLUMNS if text is None else tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise InputError(
            f"room_events has no column {', '.join(unknown)}: it has {', '.join(COLUMNS)}"
        )
    return names


def _partition_by(text: str | None) -> Literal["room", "day"] | None:
    if text is None:
        return None
    return "room" if _one_of("partition_by", text.lower(), ("room", "day")) == "room" else "day"


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise InputError(f"{name}={text!r} is not a positive number")
    return int(text)


def _truth(name: str, text: str) -> bool:
    return _one_of(name, text.lower(), ("true", "false")) == "true"


def _one_of(name: str, text: str, among: tuple[str, ...]) -> str:
    if text not in among:
        raise InputError(f"{name}={text!r} is none of {', '.join(among)}")
    return text
