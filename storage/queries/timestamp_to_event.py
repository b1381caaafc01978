"""The event nearest to a time, for "jump to date".

Client-server API, "Get the closest event ID to the given timestamp".

The events in time order (storage/persist/plan/fast_path.py) are sorted by their stream positions
as well. So the search finds the first one by bisection (in_order_positions in the schema). The
others are in an index by time. The nearer one of the two first visible events is the answer:

    in time order, by stream position     60   70   90
    out of time order, by time            50   65        at or after 61: 65, at or after 66: 70

The search reads at most `Config.traversal_rows_max` events of the index, and as many of the stream.
All of them may be hidden from a user who was away. Then it returns the next visible event in
topological order. It does not read the hidden events between
(storage/visibility/multirange.py). The search for another server ends at the bound.
"""

from typing import Final, LiteralString

from storage.database.columns import USER_SEES, WITHHELD
from storage.database.connection import Connection, require_room
from storage.database.placeholders import compose, fill
from storage.errors import InputError
from storage.ids import RoomId, ServerName, UserId
from storage.queries.events import StoredEvent, stored_of
from storage.queries.federation import TraversalRow
from storage.queries.gaps import refuse_partial
from storage.queries.pagination.page import Direction

PART_ROOM: Final[LiteralString] = """
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.out_of_range, r.is_partial, reader.principal_nid, v.*
    FROM reader
    CROSS JOIN rooms r
    CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
    WHERE r.room_id = $1::text
)
"""

TEMPLATE_OUT_OF_ORDER: Final[LiteralString] = """
SELECT *
FROM events e
WHERE e.room_nid = room.room_nid AND NOT e.outlier AND e.in_order_ts IS NOT NULL
    AND e.origin_server_ts {comparison} $3::bigint
ORDER BY e.origin_server_ts {order}, e.topological_ordering {order}, e.stream_ordering {order}
"""

TEMPLATE_STREAM: Final[LiteralString] = """
SELECT *
FROM events e
WHERE e.room_nid = room.room_nid AND NOT e.outlier AND NOT e.backfilled
    AND e.stream_ordering >= positions.first AND e.stream_ordering <= positions.last
ORDER BY e.stream_ordering {order}
"""

# each order is read up to its first visible event, and the nearer one is the answer
TEMPLATE_NEAREST: Final[LiteralString] = """
WITH
{room},
out_of_order AS MATERIALIZED (
    SELECT e.*
    FROM room
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.origin_server_ts, e.topological_ordering, e.stream_ordering,
            {is_withheld} AS withheld
        FROM ({out_of_order} LIMIT $4::bigint) AS e
        WHERE {is_visible}
        ORDER BY e.origin_server_ts {order}, e.topological_ordering {order},
            e.stream_ordering {order}
        LIMIT 1
    ) AS e
),
positions AS MATERIALIZED (  -- no event in time order is nearer outside of them
    SELECT p.*
    FROM room
    CROSS JOIN LATERAL in_order_positions(room.room_nid, {earliest}, {latest}) AS p
),
in_order AS MATERIALIZED (
    SELECT e.*
    FROM room
    CROSS JOIN positions
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.origin_server_ts, e.topological_ordering, e.stream_ordering,
            {is_withheld} AS withheld
        FROM ({stream} LIMIT $4::bigint) AS e
        WHERE e.in_order_ts IS NULL AND {is_visible}
        ORDER BY e.stream_ordering {order}
        LIMIT 1
    ) AS e
)
SELECT nearest.withheld, s.*
FROM (
    SELECT *
    FROM (TABLE in_order UNION ALL TABLE out_of_order) AS e
    ORDER BY e.origin_server_ts {order}, e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
"""

PART_WITHHELD: Final[LiteralString] = """
$2::text IS NOT NULL
    AND :withheld.of(room)
"""

PART_USER_SEES: Final[LiteralString] = """
user_sees(e, :user_sees.of(room))
"""

PART_SERVER_SEES: Final[LiteralString] = """
e.rejected IS NULL AND NOT e.soft_failed AND ($2::text IS NULL OR (
    NOT room.is_partial
    AND server_sees(e, room.own_audiences, room.shared_audiences, room.world_audiences,
        room.reader_nid, room.unread)
    AND server_gets(e, room.joined_audiences, room.world_audiences, room.reader_nid, room.unread)
))
"""

TEMPLATE_BEYOND: Final[LiteralString] = """
WITH
{room},
positions AS MATERIALIZED (
    SELECT p.*
    FROM room
    CROSS JOIN LATERAL in_order_positions(room.room_nid, {earliest}, {latest}) AS p
),
last AS MATERIALIZED (  -- the first one that was not read in either order; none: those were all
    SELECT room.room_nid, room.out_of_range, room.principal_nid, e.topological_ordering
    FROM room
    CROSS JOIN positions
    CROSS JOIN LATERAL (
        (
            SELECT e.origin_server_ts AS reached_ts, e.topological_ordering
            FROM ({out_of_order} OFFSET $4::bigint - 1 LIMIT 1) AS e
        )
        UNION ALL
        (
            SELECT COALESCE(e.in_order_ts, e.origin_server_ts), e.topological_ordering
            FROM ({stream} OFFSET $4::bigint - 1 LIMIT 1) AS e
        )
        ORDER BY reached_ts {order}
        LIMIT 1
    ) AS e
)
SELECT nearest.withheld, s.*
FROM (
    SELECT e.*
    FROM last
    CROSS JOIN LATERAL topological_ranges_of(last.room_nid, last.principal_nid, last.out_of_range,
        last.topological_ordering, {ranges}) AS part
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
            :withheld.of(part) AS withheld
        FROM (
            SELECT *
            FROM events e
            WHERE e.room_nid = last.room_nid AND NOT e.outlier
                AND e.topological_ordering >= {lowest} AND e.topological_ordering <= {highest}
            ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
            LIMIT $4::bigint
        ) AS e
        WHERE e.origin_server_ts {comparison} $3::bigint
            AND user_sees(e, :user_sees.of(part))
        ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
        LIMIT 1
    ) AS e
    ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
"""

PART_OUT_OF_ORDER_AFTER: Final[LiteralString] = fill(
    TEMPLATE_OUT_OF_ORDER, comparison=">=", order="ASC"
)

PART_OUT_OF_ORDER_BEFORE: Final[LiteralString] = fill(
    TEMPLATE_OUT_OF_ORDER, comparison="<=", order="DESC"
)

PART_STREAM_UP: Final[LiteralString] = fill(TEMPLATE_STREAM, order="ASC")

PART_STREAM_DOWN: Final[LiteralString] = fill(TEMPLATE_STREAM, order="DESC")

TEMPLATE_FIRST_MATCH: Final[LiteralString] = """
COALESCE((SELECT origin_server_ts FROM out_of_order), {otherwise})
"""

SQL_AT_OR_AFTER: Final[LiteralString] = compose(
    fill(
        TEMPLATE_NEAREST,
        room=PART_ROOM,
        out_of_order=PART_OUT_OF_ORDER_AFTER,
        stream=PART_STREAM_UP,
        order="ASC",
        earliest="$3::bigint",
        latest=fill(TEMPLATE_FIRST_MATCH, otherwise="9223372036854775807"),
        is_visible=PART_USER_SEES,
        is_withheld=PART_WITHHELD,
    ),
    USER_SEES,
    WITHHELD,
).sql

SQL_AT_OR_BEFORE: Final[LiteralString] = compose(
    fill(
        TEMPLATE_NEAREST,
        room=PART_ROOM,
        out_of_order=PART_OUT_OF_ORDER_BEFORE,
        stream=PART_STREAM_DOWN,
        order="DESC",
        earliest=fill(TEMPLATE_FIRST_MATCH, otherwise="-9223372036854775807 - 1"),
        latest="$3::bigint",
        is_visible=PART_USER_SEES,
        is_withheld=PART_WITHHELD,
    ),
    USER_SEES,
    WITHHELD,
).sql

SQL_SERVER_AT_OR_AFTER: Final[LiteralString] = compose(
    fill(
        TEMPLATE_NEAREST,
        room=PART_ROOM,
        out_of_order=PART_OUT_OF_ORDER_AFTER,
        stream=PART_STREAM_UP,
        order="ASC",
        earliest="$3::bigint",
        latest=fill(TEMPLATE_FIRST_MATCH, otherwise="9223372036854775807"),
        is_visible=PART_SERVER_SEES,
        is_withheld=PART_WITHHELD,
    ),
    WITHHELD,
).sql

SQL_SERVER_AT_OR_BEFORE: Final[LiteralString] = compose(
    fill(
        TEMPLATE_NEAREST,
        room=PART_ROOM,
        out_of_order=PART_OUT_OF_ORDER_BEFORE,
        stream=PART_STREAM_DOWN,
        order="DESC",
        earliest=fill(TEMPLATE_FIRST_MATCH, otherwise="-9223372036854775807 - 1"),
        latest="$3::bigint",
        is_visible=PART_SERVER_SEES,
        is_withheld=PART_WITHHELD,
    ),
    WITHHELD,
).sql

SQL_BEYOND_AFTER: Final[LiteralString] = compose(
    fill(
        TEMPLATE_BEYOND,
        room=PART_ROOM,
        out_of_order=PART_OUT_OF_ORDER_AFTER,
        stream=PART_STREAM_UP,
        earliest="$3::bigint",
        latest="9223372036854775807",
        comparison=">=",
        order="ASC",
        ranges="0, 100",
        lowest="GREATEST(part.lowest, last.topological_ordering)",
        highest="part.highest",
    ),
    USER_SEES,
    WITHHELD,
).sql

SQL_BEYOND_BEFORE: Final[LiteralString] = compose(
    fill(
        TEMPLATE_BEYOND,
        room=PART_ROOM,
        out_of_order=PART_OUT_OF_ORDER_BEFORE,
        stream=PART_STREAM_DOWN,
        earliest="-9223372036854775807",
        latest="$3::bigint",
        comparison="<=",
        order="DESC",
        ranges="100, 0",
        lowest="part.lowest",
        highest="LEAST(part.highest, last.topological_ordering)",
    ),
    USER_SEES,
    WITHHELD,
).sql


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
    return stored_of(row.event, withheld=row.withheld)


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
    return stored_of(row.event, withheld=row.withheld, sent=server_name is not None)


def _no_direction(direction: object) -> InputError:
    return InputError(f"direction {direction!r}: b or f")
