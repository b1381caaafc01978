"""Rooms with the numbers that an operator looks at: active lately, by id, or the largest.

The list of active rooms reads the latest positions of the stream (`RECENT_MAX`). The list by id
continues after a room. A list by a number reads the table of rooms once, a row for each room.

The number of events is exact up to `COUNTED_MAX`. For a larger room it is the planner's estimate,
if the room is among the most common values of the last ANALYZE.
"""

from typing import Final, Literal, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.sql_template import fill
from storage.ids import RoomId

TEMPLATE_ROOMS: Final[LiteralString] = """
WITH
wanted AS MATERIALIZED (
    {source}
),
common AS MATERIALIZED (  -- the planner's statistics: rooms with many events
    SELECT unnest(s.most_common_vals::text::int[]) AS room_nid,
        unnest(s.most_common_freqs) AS share
    FROM pg_stats s
    WHERE s.schemaname = current_schema() AND s.tablename = 'events' AND s.attname = 'room_nid'
),
total AS MATERIALIZED (
    SELECT GREATEST(reltuples, 0)::float8 AS events
    FROM pg_class
    WHERE oid = to_regclass('events')
)
SELECT r.room_id, r.room_version, r.joined_count, r.invited_count,
    cardinality(r.forward_extremities) AS extremities,
    (
        SELECT count(*)::int
        FROM (SELECT FROM missing_events m WHERE m.room_nid = r.room_nid LIMIT $2::bigint) AS m
    ) AS gaps,
    (
        SELECT count(*)
        FROM (
            SELECT FROM events e WHERE e.room_nid = r.room_nid AND NOT e.outlier LIMIT $2::bigint
        ) AS e
    ) AS counted_events,
    (c.share * total.events)::bigint AS estimated_events,
    r.max_topological_ordering, r.last_stream_ordering,
    (
        SELECT e.received_ts FROM events e WHERE e.stream_ordering = r.last_stream_ordering
    ) AS last_received_ts,
    r.is_partial
FROM wanted w
JOIN rooms r USING (room_nid)
CROSS JOIN total
LEFT JOIN common c ON c.room_nid = r.room_nid
ORDER BY w.place
"""

PART_RECENT: Final[LiteralString] = """
    SELECT e.room_nid, -max(e.stream_ordering) AS place
    FROM (
        SELECT e.room_nid, e.stream_ordering
        FROM events e
        WHERE e.stream_ordering IS NOT NULL
        ORDER BY e.stream_ordering DESC
        LIMIT $3::bigint
    ) AS e
    GROUP BY e.room_nid
    ORDER BY 2
    LIMIT $1::bigint
"""

PART_BY_ID: Final[LiteralString] = """
    SELECT r.room_nid, row_number() OVER (ORDER BY r.room_id) AS place
    FROM (
        SELECT room_nid, room_id
        FROM rooms
        WHERE room_id > $3::text
        ORDER BY room_id
        LIMIT $1::bigint
    ) AS r
"""

PART_LARGEST: Final[LiteralString] = """
    SELECT r.room_nid, row_number() OVER (ORDER BY r.size DESC, r.room_nid) AS place
    FROM (
        SELECT room_nid, CASE $3::text
            WHEN 'members' THEN joined_count
            WHEN 'extremities' THEN cardinality(forward_extremities)
            ELSE max_topological_ordering
        END AS size
        FROM rooms
        ORDER BY size DESC, room_nid
        LIMIT $1::bigint
    ) AS r
"""

PART_GIVEN: Final[LiteralString] = """
    SELECT r.room_nid, g.place
    FROM unnest($3::text[]) WITH ORDINALITY AS g (room_id, place)
    JOIN rooms r USING (room_id)
    LIMIT $1::bigint
"""

SQL_RECENT: Final[LiteralString] = fill(TEMPLATE_ROOMS, source=PART_RECENT)
SQL_BY_ID: Final[LiteralString] = fill(TEMPLATE_ROOMS, source=PART_BY_ID)
SQL_LARGEST: Final[LiteralString] = fill(TEMPLATE_ROOMS, source=PART_LARGEST)
SQL_GIVEN: Final[LiteralString] = fill(TEMPLATE_ROOMS, source=PART_GIVEN)

RECENT_MAX: Final = 5_000
COUNTED_MAX: Final = 1_000

Size = Literal["members", "extremities", "depth"]


class RoomLine(NamedTuple):
    """A room.

    ``gaps`` and ``counted_events`` are at most `COUNTED_MAX`. ``estimated_events``: None for a room
    of which the planner knows no share. ``max_topological_ordering`` is the length of the longest
    path of the graph. ``last_received_ts`` is when the last live event arrived, None if there is
    none.
    """

    room_id: RoomId
    room_version: str
    joined_count: int
    invited_count: int
    extremities: int
    gaps: int
    counted_events: int
    estimated_events: int | None
    max_topological_ordering: int
    last_stream_ordering: int | None
    last_received_ts: int | None
    is_partial: bool

    @property
    def events(self) -> int:
        """Return the number of events: exact below `COUNTED_MAX`, else as well as it is known."""
        if self.counted_events < COUNTED_MAX:
            return self.counted_events
        return max(self.counted_events, self.estimated_events or 0)

    @property
    def is_exact(self) -> bool:
        """Return whether `events` was counted."""
        return self.counted_events < COUNTED_MAX


async def recent_rooms(conn: Connection, limit: int = 50) -> list[RoomLine]:
    """Return the rooms of the latest events, the latest first."""
    return await conn.fetch(SQL_RECENT, limit, COUNTED_MAX, RECENT_MAX, row=RoomLine)


async def rooms_after(conn: Connection, room_id: str = "", limit: int = 50) -> list[RoomLine]:
    """Return the next rooms by id after one that need not exist."""
    return await conn.fetch(SQL_BY_ID, limit, COUNTED_MAX, room_id, row=RoomLine)


async def largest_rooms(conn: Connection, size: Size, limit: int = 50) -> list[RoomLine]:
    """Return the rooms with most joined members, forward extremities, or depth."""
    return await conn.fetch(SQL_LARGEST, limit, COUNTED_MAX, size, row=RoomLine)


async def rooms_by_id(conn: Connection, room_ids: list[RoomId]) -> list[RoomLine]:
    """Return the stored ones of these rooms, in this order."""
    return await conn.fetch(SQL_GIVEN, len(room_ids), COUNTED_MAX, room_ids, row=RoomLine)
