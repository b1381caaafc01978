"""Ranges of numbers that have rows: of events, of rooms, of stream positions.

Numbers have gaps of any length: a restore skips 2^30 stream positions and more.
"""

from collections.abc import Iterator
from typing import Final, LiteralString

from storage.database.arrow_results import ArrowConnection

SQL_FIRST_NUMBER: Final[LiteralString] = """
SELECT e.event_nid AS first
FROM events e
WHERE e.event_nid >= $1::bigint AND e.event_nid < $2::bigint
ORDER BY e.event_nid
LIMIT 1
"""

SQL_FIRST_ROOM: Final[LiteralString] = """
SELECT r.room_nid::bigint AS first
FROM rooms r
WHERE r.room_nid >= $1::bigint AND r.room_nid < $2::bigint
ORDER BY r.room_nid
LIMIT 1
"""

SQL_FIRST_POSITION: Final[LiteralString] = """
SELECT e.stream_ordering AS first
FROM events e
WHERE e.stream_ordering >= $1::bigint AND e.stream_ordering < $2::bigint
ORDER BY e.stream_ordering
LIMIT 1
"""


def filled(
    conn: ArrowConnection, first: LiteralString, begin: int, end: int, size: int
) -> Iterator[tuple[int, int]]:
    """Yield ranges (begin, end) of ``size`` numbers that have all rows from ``begin`` to ``end``.

    ``first`` is the statement that finds the first row. A long range without rows costs nothing, as
    above the positions that a restore skipped.
    """
    at = begin
    while rows := conn.rows(first, at, end):
        low: int = rows[0]["first"]
        at = min(low + size, end)
        yield low, at
