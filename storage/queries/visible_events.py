"""The visible ones among some events, for a user or a server.

The schema has the condition: `user_sees`, `server_sees`, `server_gets`.
"""

from collections.abc import Iterable
from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.ids import EventId, ServerName, UserId

SQL_VISIBLE_TO_USER: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid
)
SELECT visible.event_id
FROM reader
CROSS JOIN unnest($2::text[]) AS one (id)
CROSS JOIN LATERAL (
    SELECT e.event_id
    FROM events e
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS s
    WHERE e.event_id = one.id
        AND user_sees(e, s.joined_since, s.own_audiences, s.shared_audiences, s.world_audiences,
            s.shared_before, s.reader_nid, s.unread)
    OFFSET 0
) AS visible
"""

SQL_VISIBLE_TO_SERVER: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid
)
SELECT visible.event_id
FROM reader
CROSS JOIN unnest($2::text[]) AS one (id)
CROSS JOIN LATERAL (
    SELECT e.event_id
    FROM events e
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS s
    WHERE e.event_id = one.id
        AND server_sees(e, s.own_audiences, s.shared_audiences, s.world_audiences, s.reader_nid,
            s.unread)
        AND server_gets(e, s.joined_audiences, s.world_audiences, s.reader_nid, s.unread)
        AND (was_there(e, s.joined_since, s.joined_audiences)
            OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
            OR was_there_before(e, s.reader_nid, s.unread))
        -- nor any event of a room whose members are not all known
        AND NOT EXISTS (SELECT FROM partial_rooms p WHERE p.room_nid = e.room_nid)
    OFFSET 0
) AS visible
"""

SQL_VISIBLE_AFTER_LEAVING: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid
)
SELECT visible.event_id
FROM reader
CROSS JOIN unnest($2::text[]) AS one (id)
CROSS JOIN LATERAL (
    SELECT e.event_id
    FROM events e
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS s
    -- audiences are numbered as they begin, so this one began before the last user had left
    CROSS JOIN LATERAL (SELECT e.audience < upper(s.own_audiences) AS is_earlier) AS leaving
    WHERE e.event_id = one.id
        AND server_sees(e, s.own_audiences,
            CASE WHEN leaving.is_earlier THEN s.shared_audiences END, s.world_audiences,
            s.reader_nid, CASE WHEN leaving.is_earlier THEN s.unread END)
        AND server_gets(e, s.joined_audiences, s.world_audiences, s.reader_nid, s.unread)
        AND NOT EXISTS (SELECT FROM partial_rooms p WHERE p.room_nid = e.room_nid)
    OFFSET 0
) AS visible
"""


async def visible_to_user(
    conn: Connection, user_id: UserId, event_ids: Iterable[EventId]
) -> set[EventId]:
    """Return the events that a local user may see (client-server API, room history visibility).

    Unknown events are not among them.
    """
    return set(await conn.fetchvals(SQL_VISIBLE_TO_USER, user_id, list(event_ids)))


async def visible_to_server(
    conn: Connection, server_name: ServerName, event_ids: Iterable[EventId]
) -> set[EventId]:
    """Return the events that a server may have whole.

    For a server that was never in the room these are the world-readable ones. Soft-failed events
    are checked like others. Rejected events are never among them. Those of an erased sender are,
    if a user of the server was in the room then.
    """
    return set(await conn.fetchvals(SQL_VISIBLE_TO_SERVER, server_name, list(event_ids)))


async def visible_after_leaving(
    conn: Connection, server_name: ServerName, event_ids: Iterable[EventId]
) -> set[EventId]:
    """Return the events that a server may have, although no user of it is joined now.

    Those of erased senders are among them, for the redacted form. Under "shared", these are the
    events from before its last user has left. Others are as in `visible_to_server`.
    """
    return set(await conn.fetchvals(SQL_VISIBLE_AFTER_LEAVING, server_name, list(event_ids)))
