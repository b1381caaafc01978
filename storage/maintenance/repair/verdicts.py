"""Repair the marks of refused events that are superseded."""

from typing import Final, LiteralString

from storage.database.array_text import transposed
from storage.database.connection import Connection
from storage.maintenance.verify.verdicts import wrongly_superseded

SQL_SET_SUPERSEDED: Final[LiteralString] = """
UPDATE events e
SET superseded = NULLIF(i.superseded, false)
FROM unnest($1::text[], $2::boolean[]) AS i (event_id, superseded)
WHERE e.event_id = i.event_id
"""


async def repair_superseded(conn: Connection, room_nid: int) -> None:
    """Set the marks by the events that are stored."""
    rows = await wrongly_superseded(conn, room_nid)
    await conn.execute(SQL_SET_SUPERSEDED, *transposed(((row[0], row[2]) for row in rows), 2))
