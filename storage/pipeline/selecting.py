"""Which events a task reads: the filters that Postgres applies, the ranges that tasks share, the numbers of the events in each."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, LiteralString

from pyspark.sql.datasource import EqualTo, Filter, In

from storage.database.arrow import ArrowConnection
from storage.pipeline.positions import Bounds

SQL_NIDS_BY_NUMBER: Final[LiteralString] = """
SELECT e.event_nid
FROM events e
LEFT JOIN unnest($3::bigint[], $4::bool[], $5::bigint[], $6::bigint[]) AS b (writer_nid, backfilled, after_id, upto_id)
    ON b.writer_nid = e.writer_nid AND b.backfilled = e.backfilled
WHERE e.event_nid >= $1::bigint AND e.event_nid < $2::bigint
    AND (e.outlier OR (e.stream_ordering > b.after_id AND e.stream_ordering <= b.upto_id))
    AND ($7::text[] IS NULL OR e.room_nid IN (SELECT room_nid FROM rooms WHERE room_id = ANY($7::text[])))
    AND ($8::text[] IS NULL OR e.type_nid IN (SELECT type_nid FROM event_types WHERE type = ANY($8::text[])))
    AND ($9::text[] IS NULL OR e.sender_nid IN (SELECT principal_nid FROM principals WHERE name = ANY($9::text[])))
    AND ($10::text[] IS NULL OR e.event_id = ANY($10::text[]))
ORDER BY e.event_nid
"""

SQL_NIDS_BY_POSITION: Final[LiteralString] = """
SELECT e.event_nid
FROM events e
JOIN unnest($3::bigint[], $4::bool[], $5::bigint[], $6::bigint[]) AS b (writer_nid, backfilled, after_id, upto_id)
    ON b.writer_nid = e.writer_nid AND b.backfilled = e.backfilled
WHERE e.stream_ordering > $1::bigint AND e.stream_ordering <= $2::bigint
    AND e.stream_ordering > b.after_id AND e.stream_ordering <= b.upto_id
    AND ($7::text[] IS NULL OR e.room_nid IN (SELECT room_nid FROM rooms WHERE room_id = ANY($7::text[])))
    AND ($8::text[] IS NULL OR e.type_nid IN (SELECT type_nid FROM event_types WHERE type = ANY($8::text[])))
    AND ($9::text[] IS NULL OR e.sender_nid IN (SELECT principal_nid FROM principals WHERE name = ANY($9::text[])))
    AND ($10::text[] IS NULL OR e.event_id = ANY($10::text[]))
ORDER BY e.stream_ordering
"""

SQL_OUTLIER_NIDS: Final[LiteralString] = """
SELECT e.event_nid
FROM events e
WHERE e.outlier AND e.room_nid >= $1::bigint AND e.room_nid < $2::bigint
    AND ($3::text[] IS NULL OR e.room_nid IN (SELECT room_nid FROM rooms WHERE room_id = ANY($3::text[])))
    AND ($4::text[] IS NULL OR e.type_nid IN (SELECT type_nid FROM event_types WHERE type = ANY($4::text[])))
    AND ($5::text[] IS NULL OR e.sender_nid IN (SELECT principal_nid FROM principals WHERE name = ANY($5::text[])))
    AND ($6::text[] IS NULL OR e.event_id = ANY($6::text[]))
ORDER BY e.event_nid
"""

SQL_ROOM_NUMBERS: Final[LiteralString] = """
SELECT COALESCE(min(room_nid), 0)::bigint AS first, COALESCE(max(room_nid), 0)::bigint AS last
FROM rooms
"""

SQL_NUMBERS: Final[LiteralString] = """
SELECT COALESCE(min(event_nid), 0) AS first, COALESCE(max(event_nid), 0) AS last
FROM events
"""

SQL_FIRST_POSITION: Final[LiteralString] = """
SELECT e.stream_ordering
FROM events e
WHERE e.stream_ordering >= $1::bigint AND e.stream_ordering < $2::bigint
ORDER BY e.stream_ordering
LIMIT 1
"""

SQL_NTH_POSITION: Final[LiteralString] = """
SELECT e.stream_ordering
FROM events e
JOIN unnest($3::bigint[], $4::bool[], $5::bigint[], $6::bigint[]) AS b (writer_nid, backfilled, after_id, upto_id)
    ON b.writer_nid = e.writer_nid AND b.backfilled = e.backfilled
WHERE e.stream_ordering > $1::bigint AND e.stream_ordering <= $2::bigint
    AND e.stream_ordering > b.after_id AND e.stream_ordering <= b.upto_id
ORDER BY e.stream_ordering
OFFSET $7::bigint - 1
LIMIT 1
"""

RANGE: Final = 20_000
"""Numbers looked through by one statement."""

Select = Callable[[ArrowConnection, int, int, Bounds, "Chosen"], Iterator[list[int]]]
"""Finds the numbers of the events to read, some at a time."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Filters that Postgres applies; None: all. What Spark passes on as ``room_id = …`` or ``room_id IN (…)``, and so for the others."""

    room_id: tuple[str, ...] | None = None
    type: tuple[str, ...] | None = None
    sender: tuple[str, ...] | None = None
    event_id: tuple[str, ...] | None = None

    def take(self, wanted: Filter) -> "Chosen | None":
        """With this filter too; None where it is not one of these."""
        if not isinstance(wanted, EqualTo | In) or len(wanted.attribute) != 1:
            return None
        [name] = wanted.attribute
        values = (wanted.value,) if isinstance(wanted, EqualTo) else tuple(wanted.value)
        if name not in self.__slots__ or not all(isinstance(one, str) for one in values):
            return None
        held: tuple[str, ...] | None = getattr(self, name)
        return replace(self, **{name: values if held is None else tuple(one for one in held if one in values)})

    def columns(self) -> tuple[list[str] | None, ...]:
        """As arrays, for a statement."""
        return tuple(None if held is None else list(held) for held in (self.room_id, self.type, self.sender, self.event_id))


def split(first: int, last: int, parts: int) -> Iterator[tuple[int, int]]:
    """``first`` to ``last`` in at most so many stretches (begin, end), the end not included."""
    size = max(-(-(last + 1 - first) // parts), 1)
    for begin in range(first, last + 1, size):
        yield begin, min(begin + size, last + 1)


def by_number(conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen) -> Iterator[list[int]]:
    """The events with numbers from ``begin`` to before ``end`` that the bounds cover, and outliers, some at a time."""
    for first, after in split(begin, end - 1, max((end - begin) // RANGE, 1)):
        yield _nids(conn.table(SQL_NIDS_BY_NUMBER, first, after, *bounds.columns(), *chosen.columns()))


def by_position(conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen) -> Iterator[list[int]]:
    """The events with stream orderings from ``begin`` to before ``end`` that the bounds cover, in stream order, some at a time.

    Where there is none for long, as above what a restore took back, nothing is looked through.
    """
    at = begin
    while rows := conn.rows(SQL_FIRST_POSITION, at, end):
        first = rows[0]["stream_ordering"]
        at = min(first + RANGE, end)
        yield _nids(conn.table(SQL_NIDS_BY_POSITION, first - 1, at - 1, *bounds.columns(), *chosen.columns()))


def outliers_of(conn: ArrowConnection, begin: int, end: int, bounds: Bounds, chosen: Chosen) -> Iterator[list[int]]:  # noqa: ARG001  # a `Select`
    """The outliers of the rooms with numbers from ``begin`` to before ``end``, whatever the bounds."""
    yield _nids(conn.table(SQL_OUTLIER_NIDS, begin, end, *chosen.columns()))


def room_numbers(conn: ArrowConnection) -> tuple[int, int]:
    """The smallest and the largest number of a room; 0, 0 where there is none."""
    [row] = conn.rows(SQL_ROOM_NUMBERS)
    return row["first"], row["last"]


def numbers(conn: ArrowConnection) -> tuple[int, int]:
    """The smallest and the largest number of an event; 0, 0 where there is none."""
    [row] = conn.rows(SQL_NUMBERS)
    return row["first"], row["last"]


def nth_position(conn: ArrowConnection, bounds: Bounds, count: int) -> int | None:
    """The stream ordering of the event at which ``count`` are reached; None if there are fewer."""
    rows = conn.rows(SQL_NTH_POSITION, bounds.after, bounds.upto, *bounds.columns(), count)
    return rows[0]["stream_ordering"] if rows else None


def _nids(table: Any) -> list[int]:
    found: list[int] = table.column(0).to_pylist()
    return found


def taken(filters: Iterable[Filter], chosen: Chosen) -> tuple[Chosen, list[Filter]]:
    """What Postgres applies, and what is left to Spark."""
    left: list[Filter] = []
    for one in filters:
        more = chosen.take(one)
        if more is None:
            left.append(one)
        else:
            chosen = more
    return chosen, left
