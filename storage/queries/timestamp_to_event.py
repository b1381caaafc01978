"""The event nearest to a time, for "jump to date".

Client-server API, "Get the closest event ID to the given timestamp".

The search reads at most `Config.traversal_rows_max` events in the order of time. All of them may be
hidden from a user who was away. Then it returns the next visible event in topological order. It
does not read the hidden events between (storage/visibility/audience_ranges.py). The search for
another server ends at the bound.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.database.rooms import require_room
from storage.database.sql_template import fill
from storage.errors import InputError
from storage.ids import RoomId, ServerName, UserId
from storage.queries.events import StoredEvent, stored_of
from storage.queries.federation import EVENT, TraversalRow
from storage.queries.pagination.page import Direction
from storage.queries.partial_rooms import refuse_partial

TEMPLATE_NEAREST: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
)
SELECT nearest.withheld, s.*
FROM reader
CROSS JOIN rooms r
CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
CROSS JOIN LATERAL (
    SELECT e.event_nid, $2::text IS NOT NULL
        AND NOT was_there(e, v.joined_since, v.joined_audiences)
        AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
        AND NOT was_there_before(e, v.reader_nid, v.unread) AS withheld
    FROM (
        SELECT *
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier
            AND e.origin_server_ts {comparison} $3::bigint
        ORDER BY e.origin_server_ts {order}, e.topological_ordering {order},
            e.stream_ordering {order}
        LIMIT $4::bigint
    ) AS e
    WHERE {is_visible}
    ORDER BY e.origin_server_ts {order}, e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
WHERE r.room_id = $1::text
"""

PART_USER_SEES: Final[LiteralString] = """
user_sees(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences,
    v.shared_before, v.reader_nid, v.unread)
"""

PART_SERVER_SEES: Final[LiteralString] = """
e.rejected IS NULL AND NOT e.soft_failed AND ($2::text IS NULL OR (
    NOT r.is_partial
    AND server_sees(e, v.own_audiences, v.shared_audiences, v.world_audiences, v.reader_nid,
        v.unread)
    AND server_gets(e, v.joined_audiences, v.world_audiences, v.reader_nid, v.unread)
))
"""

TEMPLATE_BEYOND: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
),
last AS MATERIALIZED (  -- the last one of the hidden events that were read; none: those were all
    SELECT r.room_nid, r.out_of_range, reader.principal_nid, e.topological_ordering
    FROM reader
    CROSS JOIN rooms r
    CROSS JOIN LATERAL (
        SELECT e.topological_ordering
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier
            AND e.origin_server_ts {comparison} $3::bigint
        ORDER BY e.origin_server_ts {order}, e.topological_ordering {order},
            e.stream_ordering {order}
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
        last.topological_ordering, {ranges}) AS part
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
            NOT was_there(e, part.joined_since, part.joined_audiences)
                AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                AND NOT was_there_before(e, part.reader_nid, part.unread) AS withheld
        FROM (
            SELECT *
            FROM events e
            WHERE e.room_nid = last.room_nid AND NOT e.outlier
                AND e.topological_ordering >= {lowest} AND e.topological_ordering <= {highest}
            ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
            LIMIT $4::bigint
        ) AS e
        WHERE e.origin_server_ts {comparison} $3::bigint
            AND user_sees(e, part.joined_since, part.own_audiences, part.shared_audiences,
                part.world_audiences, part.shared_before, part.reader_nid, part.unread)
        ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
        LIMIT 1
    ) AS e
    ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
"""

SQL_AT_OR_AFTER: Final[LiteralString] = fill(
    TEMPLATE_NEAREST, comparison=">=", order="ASC", is_visible=PART_USER_SEES
)

SQL_AT_OR_BEFORE: Final[LiteralString] = fill(
    TEMPLATE_NEAREST, comparison="<=", order="DESC", is_visible=PART_USER_SEES
)

SQL_SERVER_AT_OR_AFTER: Final[LiteralString] = fill(
    TEMPLATE_NEAREST, comparison=">=", order="ASC", is_visible=PART_SERVER_SEES
)

SQL_SERVER_AT_OR_BEFORE: Final[LiteralString] = fill(
    TEMPLATE_NEAREST, comparison="<=", order="DESC", is_visible=PART_SERVER_SEES
)

SQL_BEYOND_AFTER: Final[LiteralString] = fill(
    TEMPLATE_BEYOND,
    comparison=">=",
    order="ASC",
    ranges="0, 100",
    lowest="GREATEST(part.lowest, last.topological_ordering)",
    highest="part.highest",
)

SQL_BEYOND_BEFORE: Final[LiteralString] = fill(
    TEMPLATE_BEYOND,
    comparison="<=",
    order="DESC",
    ranges="100, 0",
    lowest="part.lowest",
    highest="LEAST(part.highest, last.topological_ordering)",
)


async def event_near(
    conn: Connection,
    room_id: RoomId,
    user_id: UserId,
    timestamp_ms: int,
    direction: Direction,
    *,
    rows_max: int,
) -> StoredEvent | None:
    """Return the visible event nearest to a time: at or before it ("b"), or at or after it ("f").

    The time is `origin_server_ts`, which the sender claims. None: there is no such event. Exact as
    far as ``rows_max`` events reach. `UnknownRoom`, `InputError`.
    """
    arguments = room_id, user_id, timestamp_ms, rows_max
    if direction == "f":
        row = await conn.fetchrow(
            SQL_AT_OR_AFTER, *arguments, row=TraversalRow
        ) or await conn.fetchrow(SQL_BEYOND_AFTER, *arguments, row=TraversalRow)
    elif direction == "b":
        row = await conn.fetchrow(
            SQL_AT_OR_BEFORE, *arguments, row=TraversalRow
        ) or await conn.fetchrow(SQL_BEYOND_BEFORE, *arguments, row=TraversalRow)
    else:
        raise _no_direction(direction)
    if row is None:
        await require_room(conn, room_id)
        return None
    return stored_of(row[EVENT:], withheld=row.withheld)


async def timestamp_to_event(
    conn: Connection,
    room_id: RoomId,
    timestamp_ms: int,
    direction: Direction,
    *,
    server_name: ServerName | None,
    rows_max: int,
) -> StoredEvent | None:
    """Return the event nearest to a time that a server may have whole; None: any server.

    The directions are those of `event_near`. None: there is no such event among the ``rows_max``
    nearest ones. `UnknownRoom`, `InputError`.
    """
    if direction not in ("b", "f"):
        raise _no_direction(direction)
    sql = SQL_SERVER_AT_OR_AFTER if direction == "f" else SQL_SERVER_AT_OR_BEFORE
    row = await conn.fetchrow(sql, room_id, server_name, timestamp_ms, rows_max, row=TraversalRow)
    if row is None:
        await (require_room if server_name is None else refuse_partial)(conn, room_id)
        return None
    return stored_of(row[EVENT:], withheld=row.withheld, sent=server_name is not None)


def _no_direction(direction: object) -> InputError:
    return InputError(f"direction {direction!r}: b or f")
