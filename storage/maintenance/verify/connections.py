"""Check the connections of sliding sync."""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.verify.finding import Finding

SQL_CONNECTIONS: Final[LiteralString] = """
SELECT s.connection_nid, count(*) AS rooms, CASE
        WHEN c.connection_nid IS NULL THEN 'an unknown connection'
        WHEN r.room_nid IS NULL THEN 'an unknown room'
        WHEN s.required_state NOT BETWEEN 1 AND cardinality(c.required_states)
            THEN 'an unknown required_state'
        ELSE 'an unknown state'
    END AS problem
FROM sliding_rooms s
LEFT JOIN sliding_connections c USING (connection_nid)
LEFT JOIN rooms r USING (room_nid)
WHERE c.connection_nid IS NULL OR r.room_nid IS NULL
    OR s.required_state NOT BETWEEN 1 AND cardinality(c.required_states)
    OR (s.number > c.base AND s.number <> ALL(c.unconfirmed))
GROUP BY 1, 3
ORDER BY 1, 3
"""


class MistakenConnectionRow(NamedTuple):
    """A connection with rows that refer to something unknown."""

    connection_nid: int
    rooms: int
    problem: str


async def check_connections(conn: Connection) -> AsyncIterator[Finding]:
    """Check that rooms of connections refer to known rows ("sliding_rooms")."""
    for row in await conn.fetch(SQL_CONNECTIONS, row=MistakenConnectionRow):
        found = f"{row.rooms} rows of {row.problem}"
        yield Finding("sliding_rooms", None, (f"connection {row.connection_nid}",), found, "none")
