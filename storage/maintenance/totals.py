"""Totals for the progress of a job: cheap counts, and the estimate of Postgres."""

from collections.abc import Collection
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection

SQL_ESTIMATE: Final[LiteralString] = """
SELECT (c.reltuples / c.relpages * pg_relation_size(c.oid)
    / current_setting('block_size')::bigint)::bigint
FROM pg_class c
WHERE c.oid = to_regclass('events') AND c.reltuples > 0 AND c.relpages > 0
"""

SQL_EVENTS: Final[LiteralString] = """
SELECT count(*)
FROM events
"""

SQL_EVENTS_OF_ROOMS: Final[LiteralString] = """
SELECT count(*)
FROM rooms r
JOIN events e USING (room_nid)
WHERE r.room_id = ANY($1::text[])
"""

SQL_ROOMS: Final[LiteralString] = """
SELECT count(*)
FROM rooms
"""


class Total(NamedTuple):
    """A number of rows, exact or estimated."""

    rows: int
    is_estimate: bool


async def event_total(conn: Connection, room_ids: Collection[str] | None = None) -> Total:
    """Return the number of events of these rooms, or about how many there are in all.

    The estimate is that of the last ANALYZE or VACUUM, scaled by the size of the table now. Without
    one the table is new, and is counted.
    """
    if room_ids is not None:
        return Total(await conn.fetchval(SQL_EVENTS_OF_ROOMS, list(room_ids)), is_estimate=False)
    estimate: int | None = await conn.fetchval(SQL_ESTIMATE)
    if estimate is not None:
        return Total(estimate, is_estimate=True)
    return Total(await conn.fetchval(SQL_EVENTS), is_estimate=False)


async def room_total(conn: Connection) -> int:
    return int(await conn.fetchval(SQL_ROOMS))
