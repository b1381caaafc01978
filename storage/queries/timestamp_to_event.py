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
from storage.errors import InputError
from storage.ids import RoomId, ServerName, UserId
from storage.queries.events import ReaderEventRow, StoredEvent, stored_of
from storage.queries.gaps import refuse_partial
from storage.queries.pagination.page import Direction
from storage.queries.pagination.statements import DirectedStatements, directed_statements

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
        FROM ({out_of_order} LIMIT :rows_max) AS e
        WHERE {is_visible}
        ORDER BY {by_time}
        LIMIT 1
    ) AS e
),
limits AS MATERIALIZED (  -- no event in time order is nearer outside of them
    SELECT COALESCE((SELECT origin_server_ts FROM out_of_order), {furthest}) AS furthest_ts
),
{positions},
in_order AS MATERIALIZED (
    SELECT e.*
    FROM room
    CROSS JOIN positions
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.origin_server_ts, e.topological_ordering, e.stream_ordering,
            {is_withheld} AS withheld
        FROM ({stream} LIMIT :rows_max) AS e
        WHERE e.in_order_ts IS NULL AND {is_visible}
        ORDER BY e.stream_ordering {order}
        LIMIT 1
    ) AS e
)
SELECT nearest.withheld, s.*
FROM (
    SELECT *
    FROM (TABLE in_order UNION ALL TABLE out_of_order) AS e
    ORDER BY {by_time}
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
"""

TEMPLATE_BEYOND: Final[LiteralString] = """
WITH
{room},
limits AS (SELECT {furthest} AS furthest_ts),
{positions},
last AS MATERIALIZED (  -- the first one that was not read in either order; none: those were all
    SELECT room.room_nid, room.out_of_range, room.principal_nid, e.topological_ordering
    FROM room
    CROSS JOIN positions
    CROSS JOIN LATERAL (
        (
            SELECT e.origin_server_ts AS reached_ts, e.topological_ordering
            FROM ({out_of_order} OFFSET :rows_max - 1 LIMIT 1) AS e
        )
        UNION ALL
        (
            SELECT COALESCE(e.in_order_ts, e.origin_server_ts), e.topological_ordering
            FROM ({stream} OFFSET :rows_max - 1 LIMIT 1) AS e
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
        last.topological_ordering, CASE WHEN {forwards} THEN 0 ELSE 100 END,
        CASE WHEN {forwards} THEN 100 ELSE 0 END) AS part
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
            :withheld.of(part) AS withheld
        FROM (
            SELECT *
            FROM events e
            WHERE e.room_nid = last.room_nid AND NOT e.outlier
                AND e.topological_ordering >= part.lowest AND e.topological_ordering <= part.highest
                AND e.topological_ordering {ahead} last.topological_ordering
            ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
            LIMIT :rows_max
        ) AS e
        WHERE e.origin_server_ts {ahead} :timestamp
            AND user_sees(e, :user_sees.of(part))
        ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
        LIMIT 1
    ) AS e
    ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
"""

PARTS_SEARCH: Final[dict[str, LiteralString]] = {
    "room": """
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = :reader),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.out_of_range, r.is_partial, reader.principal_nid, v.*
    FROM reader
    CROSS JOIN rooms r
    CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
    WHERE r.room_id = :room_id
)
    """,
    "positions": """
positions AS MATERIALIZED (
    SELECT p.*
    FROM room
    CROSS JOIN limits
    CROSS JOIN LATERAL in_order_positions(room.room_nid, LEAST(:timestamp, limits.furthest_ts),
        GREATEST(:timestamp, limits.furthest_ts)) AS p
)
    """,
    "out_of_order": """
SELECT *
FROM events e
WHERE e.room_nid = room.room_nid AND NOT e.outlier AND e.in_order_ts IS NOT NULL
    AND e.origin_server_ts {ahead} :timestamp
ORDER BY {by_time}
    """,
    "stream": """
SELECT *
FROM events e
WHERE e.room_nid = room.room_nid AND NOT e.outlier AND NOT e.backfilled
    AND e.stream_ordering >= positions.first AND e.stream_ordering <= positions.last
ORDER BY e.stream_ordering {order}
    """,
    "by_time": """
e.origin_server_ts {order}, e.topological_ordering {order}, e.stream_ordering {order}
    """,
    "is_withheld": ":reader IS NOT NULL AND :withheld.of(room)",
    "is_visible": "user_sees(e, :user_sees.of(room))",
}

PARTS_SERVER_SEARCH: Final[dict[str, LiteralString]] = {
    **PARTS_SEARCH,
    "is_visible": """
e.rejected IS NULL AND NOT e.soft_failed AND (:reader IS NULL OR (
    NOT room.is_partial
    AND server_sees(e, room.own_audiences, room.shared_audiences, room.world_audiences,
        room.reader_nid, room.unread)
    AND server_gets(e, room.joined_audiences, room.world_audiences, room.reader_nid, room.unread)
))
    """,
}

SEARCH_VALUES: Final[dict[str, str]] = {
    "room_id": "text",
    "reader": "text",
    "timestamp": "bigint",
    "rows_max": "bigint",
}

SQL_NEAREST: Final[DirectedStatements] = directed_statements(
    TEMPLATE_NEAREST, PARTS_SEARCH, USER_SEES, WITHHELD, **SEARCH_VALUES
)

SQL_NEAREST_OF_SERVER: Final[DirectedStatements] = directed_statements(
    TEMPLATE_NEAREST, PARTS_SERVER_SEARCH, WITHHELD, **SEARCH_VALUES
)

SQL_BEYOND: Final[DirectedStatements] = directed_statements(
    TEMPLATE_BEYOND, PARTS_SEARCH, USER_SEES, WITHHELD, **SEARCH_VALUES
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
    _check(direction)
    arguments = room_id, user_id, timestamp_ms, rows_max
    row = await SQL_NEAREST.fetchrow(
        conn, direction, *arguments, row=ReaderEventRow
    ) or await SQL_BEYOND.fetchrow(conn, direction, *arguments, row=ReaderEventRow)
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
    _check(direction)
    row = await SQL_NEAREST_OF_SERVER.fetchrow(
        conn, direction, room_id, server_name, timestamp_ms, rows_max, row=ReaderEventRow
    )
    if row is None:
        await (require_room if server_name is None else refuse_partial)(conn, room_id)
        return None
    return stored_of(row.event, withheld=row.withheld, sent=server_name is not None)


def _check(direction: object) -> None:
    if direction not in ("b", "f"):
        raise InputError(f"direction {direction!r}: b or f")
