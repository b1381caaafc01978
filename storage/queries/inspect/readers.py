"""The local users of a room, and whether an event is visible to each.

They are read from the table of visibility, in the order of their numbers. Users without a row there
were never members: they see world-readable events only.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import EventId, UserId

SQL_READERS: Final[LiteralString] = """
SELECT p.name AS user_id,
    COALESCE(user_sees(e, s.joined_since, s.own_audiences, s.shared_audiences, s.world_audiences,
        s.shared_before, s.reader_nid, s.unread), false) AS is_visible
FROM events e
CROSS JOIN LATERAL (
    SELECT v.principal_nid
    FROM visibility v
    WHERE v.room_nid = e.room_nid AND v.principal_nid > 2
    ORDER BY v.principal_nid
    LIMIT $2::bigint
) AS v
JOIN principals p USING (principal_nid)
CROSS JOIN LATERAL visibility_of(e.room_nid, v.principal_nid) AS s
WHERE e.event_id = $1::text AND starts_with(p.name, '@')
ORDER BY p.name
"""

READERS_MAX: Final = 500


class ReaderRow(NamedTuple):
    """A local user who is or was a member, or is invited, and whether they may see the event."""

    user_id: UserId
    is_visible: bool


async def readers(conn: Connection, event_id: EventId) -> list[ReaderRow]:
    """Return local users with a row of visibility in the room of an event: at most so many rows."""
    return await conn.fetch(SQL_READERS, event_id, READERS_MAX, row=ReaderRow)
