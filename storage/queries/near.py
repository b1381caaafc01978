"""The event nearest to a time, for "jump to date". Client-server API, "Get the closest event ID to the given timestamp"."""

from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.errors import InputError
from storage.ids import RoomId, UserId
from storage.queries.events import StoredEvent, stored_of
from storage.queries.federation import EVENT, TraversalRow
from storage.queries.messages import Direction
from storage.queries.state import require_room

SQL_AT_OR_AFTER: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text), 0) AS principal_nid
)
SELECT nearest.withheld, s.*
FROM reader
CROSS JOIN rooms r
CROSS JOIN LATERAL sight_of(r.room_nid, reader.principal_nid) AS sight
CROSS JOIN LATERAL (
    SELECT e.event_nid, NOT was_there(e, sight.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AS withheld
    FROM events e
    WHERE e.room_nid = r.room_nid AND NOT e.outlier AND e.origin_server_ts >= $3::bigint
        AND user_sees(e, sight.own_audiences, sight.shared_audiences, sight.world_audiences, sight.shared_before)
    ORDER BY e.origin_server_ts, e.topological_ordering, e.stream_ordering
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
WHERE r.room_id = $1::text
"""

SQL_AT_OR_BEFORE: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text), 0) AS principal_nid
)
SELECT nearest.withheld, s.*
FROM reader
CROSS JOIN rooms r
CROSS JOIN LATERAL sight_of(r.room_nid, reader.principal_nid) AS sight
CROSS JOIN LATERAL (
    SELECT e.event_nid, NOT was_there(e, sight.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AS withheld
    FROM events e
    WHERE e.room_nid = r.room_nid AND NOT e.outlier AND e.origin_server_ts <= $3::bigint
        AND user_sees(e, sight.own_audiences, sight.shared_audiences, sight.world_audiences, sight.shared_before)
    ORDER BY e.origin_server_ts DESC, e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
WHERE r.room_id = $1::text
"""


async def event_near(conn: Connection, room_id: RoomId, user_id: UserId, timestamp_ms: int, direction: Direction) -> StoredEvent | None:
    """The visible event at a time (as its sender claims it) or the nearest before it ("b") or after it ("f"); None if there is none.

    `UnknownRoom`.
    """
    if direction == "f":
        row = await conn.fetchrow(SQL_AT_OR_AFTER, room_id, user_id, timestamp_ms, row=TraversalRow)
    elif direction == "b":
        row = await conn.fetchrow(SQL_AT_OR_BEFORE, room_id, user_id, timestamp_ms, row=TraversalRow)
    else:
        raise InputError(f"direction {direction!r}: b or f")
    if row is None:
        await require_room(conn, room_id)
        return None
    return stored_of(row[EVENT:], withheld=row.withheld)
