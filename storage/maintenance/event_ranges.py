"""Ranges of so many events, for jobs that read all of them: by their numbers, or by arrival.

The numbers have gaps of any length: a restore skips 2^30 stream positions and more. So a job goes
from row to row, never from number to number.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection

SQL_END_OF_NIDS: Final[LiteralString] = """
SELECT max(e.event_nid)
FROM (
    SELECT event_nid
    FROM events
    WHERE event_nid > $1::bigint AND event_nid <= $2::bigint
    ORDER BY event_nid
    LIMIT $3::int
) AS e
"""

SQL_END_OF_POSITIONS: Final[LiteralString] = """
SELECT max(e.stream_ordering)
FROM (
    SELECT stream_ordering
    FROM events
    WHERE stream_ordering > $1::bigint AND stream_ordering <= $2::bigint
    ORDER BY stream_ordering
    LIMIT $3::int
) AS e
"""


async def end_of_nids(conn: Connection, after: int, last: int, count: int) -> int | None:
    """Return the nid of the ``count``-th event after a nid, or of the last one up to ``last``.

    None: there is no further event.
    """
    found: int | None = await conn.fetchval(SQL_END_OF_NIDS, after, last, count)
    return found


async def end_of_positions(conn: Connection, after: int, last: int, count: int) -> int | None:
    """Return the same for stream positions, of live and of backfilled events."""
    found: int | None = await conn.fetchval(SQL_END_OF_POSITIONS, after, last, count)
    return found
