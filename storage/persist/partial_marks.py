"""Mark a room as partial, in a transaction before its join is stored.

A process that is killed in between leaves a mark without a join. Such a mark may be dropped at any
time, also while the join is on its way: the writer refuses a join with a partial state whose mark
is gone (`AppendOptions.partial_join`), and the mark is made again. So a join with a partial state
is never stored without the mark.
"""

from collections.abc import Iterable
from typing import Final, LiteralString

from storage.database.connection import Connection, Database
from storage.ids import EventId, RoomId, ServerName
from storage.persist.room_lock import lock_room

SQL_BEGIN: Final[LiteralString] = """
WITH
marked AS (
    INSERT INTO partial_rooms (began_ts, room_nid, join_event_id, origin, servers)
    SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint, $1::int, $2::text, $3::text,
        $4::text[]
    WHERE NOT EXISTS (SELECT FROM events WHERE event_id = $2::text AND NOT outlier)
    ON CONFLICT (room_nid) DO NOTHING
    RETURNING room_nid
)
UPDATE rooms r
SET is_partial = true
FROM marked
WHERE r.room_nid = marked.room_nid
"""

SQL_DROP_MARK: Final[LiteralString] = """
WITH gone AS (
    DELETE FROM partial_rooms p
    WHERE p.room_nid = $1::int AND p.join_event_id = COALESCE($2::text, p.join_event_id)
        AND NOT EXISTS (
            SELECT FROM events e
            WHERE e.event_id = p.join_event_id AND NOT e.outlier AND e.rejected IS NULL
        )
    RETURNING room_nid
)
UPDATE rooms r
SET is_partial = false
FROM gone
WHERE r.room_nid = gone.room_nid
"""

SQL_IS_MARKED: Final[LiteralString] = """
SELECT EXISTS (
    SELECT FROM partial_rooms WHERE room_nid = $1::int AND join_event_id = $2::text
)
"""

SQL_LOST_MARKS: Final[LiteralString] = """
SELECT r.room_id
FROM partial_rooms p
JOIN rooms r USING (room_nid)
WHERE NOT EXISTS (
    SELECT FROM events e
    WHERE e.event_id = p.join_event_id AND NOT e.outlier AND e.rejected IS NULL
)
ORDER BY r.room_nid
"""


async def begin(
    conn: Connection,
    room_id: RoomId,
    join_event_id: EventId,
    origin: ServerName,
    servers: Iterable[ServerName],
) -> bool:
    """Mark a room whose outliers are stored; return whether it is marked by this join.

    It is not if the join was stored before without a mark, or if another join that is stored has
    marked the room.
    """
    room_nid = await lock_room(conn, room_id)
    await conn.execute(SQL_DROP_MARK, room_nid, None)
    await conn.execute(SQL_BEGIN, room_nid, join_event_id, origin, sorted(set(servers)))
    return bool(await conn.fetchval(SQL_IS_MARKED, room_nid, join_event_id))


async def abandon(conn: Connection, room_id: RoomId, join_event_id: EventId) -> None:
    """Take back the mark of a join that was not stored, or was rejected."""
    await conn.execute(SQL_DROP_MARK, await lock_room(conn, room_id), join_event_id)


async def drop_lost_marks(database: Database) -> list[RoomId]:
    """Drop the marks whose joins are not stored; return their rooms.

    Processes that were killed have left them.
    """
    async with database.connection() as conn:
        lost: list[RoomId] = await conn.fetchvals(SQL_LOST_MARKS)
    for room_id in lost:
        async with database.transaction() as conn:
            await conn.execute(SQL_DROP_MARK, await lock_room(conn, room_id), None)
    return lost
