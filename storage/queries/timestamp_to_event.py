"""The event nearest to a time, for "jump to date".

Client-server API, "Get the closest event ID to the given timestamp".

Events are looked at in the order of time, at most `Config.traversal_rows_max` of them. If all of
those are hidden from the user, who was away for so long, the next one in topological order that
they may see is the answer: what is hidden between is not looked at
(storage/visibility/audience_ranges.py).
"""

from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.database.rooms import require_room
from storage.errors import InputError
from storage.ids import RoomId, UserId
from storage.queries.events import StoredEvent, stored_of
from storage.queries.federation import EVENT, TraversalRow
from storage.queries.pagination.page import Direction

SQL_AT_OR_AFTER: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
)
SELECT nearest.withheld, s.*
FROM reader
CROSS JOIN rooms r
CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS sight
CROSS JOIN LATERAL (
    SELECT e.event_nid, NOT was_there(e, sight.joined_since, sight.joined_audiences)
        AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
        AND NOT was_there_before(e, sight.reader_nid, sight.unread) AS withheld
    FROM (
        SELECT *
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier AND e.origin_server_ts >= $3::bigint
        ORDER BY e.origin_server_ts, e.topological_ordering, e.stream_ordering
        LIMIT $4::bigint
    ) AS e
    WHERE user_sees(e, sight.joined_since, sight.own_audiences, sight.shared_audiences,
        sight.world_audiences,
        sight.shared_before, sight.reader_nid, sight.unread)
    ORDER BY e.origin_server_ts, e.topological_ordering, e.stream_ordering
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
WHERE r.room_id = $1::text
"""

SQL_AT_OR_BEFORE: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
)
SELECT nearest.withheld, s.*
FROM reader
CROSS JOIN rooms r
CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS sight
CROSS JOIN LATERAL (
    SELECT e.event_nid, NOT was_there(e, sight.joined_since, sight.joined_audiences)
        AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
        AND NOT was_there_before(e, sight.reader_nid, sight.unread) AS withheld
    FROM (
        SELECT *
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier AND e.origin_server_ts <= $3::bigint
        ORDER BY e.origin_server_ts DESC, e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $4::bigint
    ) AS e
    WHERE user_sees(e, sight.joined_since, sight.own_audiences, sight.shared_audiences,
        sight.world_audiences,
        sight.shared_before, sight.reader_nid, sight.unread)
    ORDER BY e.origin_server_ts DESC, e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
WHERE r.room_id = $1::text
"""

SQL_BEYOND_AFTER: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
),
last AS MATERIALIZED (  -- of those looked at in vain, the latest; none: it was all of them
    SELECT r.room_nid, r.out_of_range, reader.principal_nid, e.topological_ordering
    FROM reader
    CROSS JOIN rooms r
    CROSS JOIN LATERAL (
        SELECT e.topological_ordering
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier AND e.origin_server_ts >= $3::bigint
        ORDER BY e.origin_server_ts, e.topological_ordering, e.stream_ordering
        OFFSET $4::bigint - 1
        LIMIT 1
    ) AS e
    WHERE r.room_id = $1::text
)
SELECT nearest.withheld, s.*
FROM (
    SELECT e.*
    FROM last
    CROSS JOIN LATERAL topological_ranges_of(last.room_nid, last.principal_nid, last.out_of_range,
        last.topological_ordering, 0, 100) AS part
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
            NOT was_there(e, part.joined_since, part.joined_audiences)
                AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                AND NOT was_there_before(e, part.reader_nid, part.unread) AS withheld
        FROM (
            SELECT *
            FROM events e
            WHERE e.room_nid = last.room_nid AND NOT e.outlier
                AND e.topological_ordering >= GREATEST(part.lowest, last.topological_ordering)
                    AND e.topological_ordering <= part.highest
            ORDER BY e.topological_ordering, e.stream_ordering
            LIMIT $4::bigint
        ) AS e
        WHERE e.origin_server_ts >= $3::bigint
            AND user_sees(e, part.joined_since, part.own_audiences, part.shared_audiences,
                part.world_audiences,
                part.shared_before, part.reader_nid, part.unread)
        ORDER BY e.topological_ordering, e.stream_ordering
        LIMIT 1
    ) AS e
    ORDER BY e.topological_ordering, e.stream_ordering
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
"""

SQL_BEYOND_BEFORE: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
),
last AS MATERIALIZED (  -- of those looked at in vain, the earliest; none: it was all of them
    SELECT r.room_nid, r.out_of_range, reader.principal_nid, e.topological_ordering
    FROM reader
    CROSS JOIN rooms r
    CROSS JOIN LATERAL (
        SELECT e.topological_ordering
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier AND e.origin_server_ts <= $3::bigint
        ORDER BY e.origin_server_ts DESC, e.topological_ordering DESC, e.stream_ordering DESC
        OFFSET $4::bigint - 1
        LIMIT 1
    ) AS e
    WHERE r.room_id = $1::text
)
SELECT nearest.withheld, s.*
FROM (
    SELECT e.*
    FROM last
    CROSS JOIN LATERAL topological_ranges_of(last.room_nid, last.principal_nid, last.out_of_range,
        last.topological_ordering, 100, 0) AS part
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
            NOT was_there(e, part.joined_since, part.joined_audiences)
                AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                AND NOT was_there_before(e, part.reader_nid, part.unread) AS withheld
        FROM (
            SELECT *
            FROM events e
            WHERE e.room_nid = last.room_nid AND NOT e.outlier
                AND e.topological_ordering >= part.lowest
                    AND e.topological_ordering <= LEAST(part.highest, last.topological_ordering)
            ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
            LIMIT $4::bigint
        ) AS e
        WHERE e.origin_server_ts <= $3::bigint
            AND user_sees(e, part.joined_since, part.own_audiences, part.shared_audiences,
                part.world_audiences,
                part.shared_before, part.reader_nid, part.unread)
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT 1
    ) AS e
    ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
"""


async def event_near(
    conn: Connection,
    room_id: RoomId,
    user_id: UserId,
    timestamp_ms: int,
    direction: Direction,
    *,
    rows_max: int,
) -> StoredEvent | None:
    """The visible event at a time (as its sender claims it) or the nearest before it ("b") or after it ("f"); None if there is none.

    Exact as far as ``rows_max`` events reach. `UnknownRoom`, `InputError`.
    """
    asked = room_id, user_id, timestamp_ms, rows_max
    if direction == "f":
        row = await conn.fetchrow(SQL_AT_OR_AFTER, *asked, row=TraversalRow) or await conn.fetchrow(
            SQL_BEYOND_AFTER, *asked, row=TraversalRow
        )
    elif direction == "b":
        row = await conn.fetchrow(
            SQL_AT_OR_BEFORE, *asked, row=TraversalRow
        ) or await conn.fetchrow(SQL_BEYOND_BEFORE, *asked, row=TraversalRow)
    else:
        raise InputError(f"direction {direction!r}: b or f")
    if row is None:
        await require_room(conn, room_id)
        return None
    return stored_of(row[EVENT:], withheld=row.withheld)
