"""Check which refused events are superseded, and so are no extremities once readmitted."""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.database.sql_template import fill
from storage.maintenance.room_events import PART_ROOM_EVENTS
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom

TEMPLATE_HAS_REFUSED: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM {events} AS e WHERE e.refused IS NOT NULL)
"""

SQL_HAS_REFUSED: Final[LiteralString] = fill(
    TEMPLATE_HAS_REFUSED,
    events=PART_ROOM_EVENTS,
)

TEMPLATE_SUPERSEDED: Final[LiteralString] = """
WITH RECURSIVE
named AS (  -- by an accepted live event, also through events that can be no extremity
    SELECT n.event_nid
    FROM events e
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE e.room_nid = $1::int AND NOT e.outlier AND e.rejected IS NULL AND NOT e.soft_failed
        AND NOT e.backfilled
    UNION
    SELECT n.event_nid
    FROM named
    CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = named.event_nid OFFSET 0) AS e
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE NOT e.outlier AND (e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled)
)
SELECT e.event_id, e.superseded IS TRUE AS found, n.event_nid IS NOT NULL AS expected
FROM {events} AS e
LEFT JOIN named n USING (event_nid)
WHERE e.refused IS NOT NULL
    AND e.superseded IS TRUE <> (n.event_nid IS NOT NULL)
    AND NOT (e.superseded IS TRUE  -- the events that superseded it may be purged
        AND EXISTS (SELECT FROM purge_jobs j WHERE j.room_nid = $1::int))
ORDER BY e.event_id
"""

SQL_SUPERSEDED: Final[LiteralString] = compose(
    fill(
        TEMPLATE_SUPERSEDED,
        events=PART_ROOM_EVENTS,
    ),
    PREV_NIDS,
).sql


class SupersededRow(NamedTuple):
    """A refused event whose flag is wrong: as stored, and as it should be."""

    event_id: str
    found: bool
    expected: bool


async def wrongly_superseded(conn: Connection, room_nid: int) -> list[SupersededRow]:
    """Return the refused events whose flag is wrong. Most rooms have none, and one scan ends it."""
    if not await conn.fetchval(SQL_HAS_REFUSED, room_nid):
        return []
    return await conn.fetch(SQL_SUPERSEDED, room_nid, row=SupersededRow)


async def check_verdicts(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that a refused event is marked once an accepted live event descends from it.

    The verdict itself is the caller's, and nothing else in the tables says it ("superseded").
    """
    for row in await wrongly_superseded(conn, room.nid):
        yield room.finding("superseded", [row.event_id], row.found, row.expected)
