"""Check interned names that the code knows, and that no row is of a room that is not stored."""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.names import KNOWN_EMPTY_KEYS, KNOWN_TYPES
from storage.maintenance.verify.finding import Finding

SQL_KNOWN_NAMES: Final[LiteralString] = """
SELECT 'event_types' AS table_name, k.nid, t.type AS found, k.name AS expected
FROM unnest($1::int[], $2::text[]) AS k (nid, name)
LEFT JOIN event_types t ON t.type_nid = k.nid
WHERE t.type IS DISTINCT FROM k.name
UNION ALL
SELECT 'state_keys', k.nid, s.type_nid || ' ' || quote_literal(s.state_key), k.nid || ' '''''
FROM unnest($3::int[]) AS k (nid)
LEFT JOIN state_keys s ON s.state_key_nid = k.nid
WHERE (s.type_nid = k.nid AND s.state_key = '') IS NOT TRUE
UNION ALL
SELECT 'principals', k.nid, p.name, k.name
FROM (VALUES (1, '*everybody'), (2, '*shared')) AS k (nid, name)
LEFT JOIN principals p ON p.principal_nid = k.nid
WHERE p.name IS DISTINCT FROM k.name
ORDER BY 1, 2
"""

SQL_ORPHANS: Final[LiteralString] = """
SELECT o.table_name, o.room_nid, o.rows
FROM (
    SELECT 'events' AS table_name, room_nid, count(*) AS rows FROM events GROUP BY 2
    UNION ALL SELECT 'missing_events', room_nid, count(*) FROM missing_events GROUP BY 2
    UNION ALL SELECT 'dropped_extremities', room_nid, count(*) FROM dropped_extremities GROUP BY 2
    UNION ALL SELECT 'waiting_redactions', room_nid, count(*) FROM waiting_redactions GROUP BY 2
    UNION ALL SELECT 'reordered_events', room_nid, count(*) FROM reordered_events GROUP BY 2
    UNION ALL SELECT 'state_groups', room_nid, count(*) FROM state_groups GROUP BY 2
    UNION ALL SELECT 'current_state', room_nid, count(*) FROM current_state GROUP BY 2
    UNION ALL SELECT 'state_deltas', room_nid, count(*) FROM state_deltas GROUP BY 2
    UNION ALL SELECT 'memberships', room_nid, count(*) FROM memberships GROUP BY 2
    UNION ALL SELECT 'visibility', room_nid, count(*) FROM visibility GROUP BY 2
    UNION ALL SELECT 'past_visibility', room_nid, count(*) FROM past_visibility GROUP BY 2
    UNION ALL SELECT 'audiences', room_nid, count(*) FROM audiences GROUP BY 2
) AS o
LEFT JOIN rooms r USING (room_nid)
WHERE r.room_nid IS NULL
ORDER BY 1, 2
"""


class WrongNameRow(NamedTuple):
    """A number below 1000 with another name than the code gives it."""

    table_name: str
    nid: int
    found: str | None
    expected: str


class OrphansRow(NamedTuple):
    """Rows of a room that has no row in `rooms`."""

    table_name: str
    room_nid: int
    rows: int


async def check_names(conn: Connection) -> AsyncIterator[Finding]:
    """Check the names whose numbers the code knows ("names")."""
    types, numbers = list(KNOWN_TYPES), list(KNOWN_TYPES.values())
    for row in await conn.fetch(
        SQL_KNOWN_NAMES, numbers, types, list(KNOWN_EMPTY_KEYS), row=WrongNameRow
    ):
        subject = (row.table_name, str(row.nid))
        yield Finding("names", None, subject, row.found or "no row", row.expected)


async def check_orphans(conn: Connection) -> AsyncIterator[Finding]:
    """Check that each row of a room has a room ("orphans")."""
    for row in await conn.fetch(SQL_ORPHANS, row=OrphansRow):
        subject = (row.table_name, f"room_nid {row.room_nid}")
        yield Finding("orphans", None, subject, f"{row.rows} rows", "a row of rooms")
