"""Tell the caches of every process to forget what maintenance has changed.

After a repair or the purge of a whole room, a cache of reads is emptied. After each batch of a
purge, the writers forget what was removed. Each change is one row, however much has changed. It is
a fact of the stream "caches" under a separate writer, "maintenance". No process runs under that
name, so the others advance its positions as they do for a writer that is gone. The lock on its row
keeps them from passing an id that is not committed yet.
"""

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString

from storage.database.connection import Connection, Database
from storage.streams.caches import CURRENT_STATE, REMOVED, Kind
from storage.streams.startup import SQL_FIND_WRITER, enter

INSTANCE_NAME: Final = "maintenance"

SQL_LOCK_POSITION: Final[LiteralString] = """
SELECT stream_id
FROM stream_positions
WHERE stream_name = 'caches' AND instance_name = $1::text
FOR UPDATE
"""

SQL_ANNOUNCE: Final[LiteralString] = """
WITH fact AS (
    INSERT INTO cache_invalidations (stream_id, invalidation_ts, writer_nid, cache_name, keys)
    SELECT nextval('caches_stream'), (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
        w.writer_nid, $2::text, $3::text[]
    FROM writers w
    WHERE w.instance_name = $1::text
    RETURNING stream_id
)
UPDATE stream_positions p
SET stream_id = GREATEST(p.stream_id, fact.stream_id)
FROM fact
WHERE p.stream_name = 'caches' AND p.instance_name = $1::text
"""

SQL_ANNOUNCE_REMOVED: Final[LiteralString] = """
WITH
room AS (
    UPDATE rooms
    SET removals = removals + 1
    WHERE room_id = $2::text
    RETURNING removals
),
fact AS (
    INSERT INTO cache_invalidations (stream_id, invalidation_ts, writer_nid, cache_name, keys)
    SELECT nextval('caches_stream'), (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
        w.writer_nid, $3::text,
        ARRAY[$2::text, room.removals::text, $4::text] || $5::text[]
    FROM room
    JOIN writers w ON w.instance_name = $1::text
    RETURNING stream_id
)
UPDATE stream_positions p
SET stream_id = GREATEST(p.stream_id, fact.stream_id)
FROM fact
WHERE p.stream_name = 'caches' AND p.instance_name = $1::text
"""


async def register_writer(database: Database) -> None:
    """Register the writer, once for the life of the database.

    It takes a transaction of its own, because it waits for the writes under way.
    """
    async with database.connection() as conn:
        writer_nid = await conn.fetchval(SQL_FIND_WRITER, INSTANCE_NAME)
    if writer_nid is None:
        async with database.transaction() as conn:
            await enter(conn, INSTANCE_NAME)


async def invalidate_caches(
    conn: Connection, cache_name: str = CURRENT_STATE, keys: Sequence[str] | None = None
) -> None:
    """Empty a cache in every process when this transaction commits, or drop one key of it.

    Call it last in the transaction, and `register_writer` before, in another one. The caches are
    those of `storage.streams.caches`: "events", "current_state", "rooms_of"; `CURRENT_STATE` stands
    for the latter two.
    """
    await conn.fetchval(SQL_LOCK_POSITION, INSTANCE_NAME)
    await conn.execute(SQL_ANNOUNCE, INSTANCE_NAME, cache_name, keys)


async def publish_removed(conn: Connection, room_id: str, kind: Kind, ids: Iterable[str]) -> None:
    """Publish what this transaction removes from a room, so that dependent plans are checked.

    The room must be locked. ``ids``: event ids, or state groups. Events that are no longer stored
    also have their nid, after a ``#``. Call it last in the transaction, and `register_writer`
    before, in another one.
    """
    await conn.fetchval(SQL_LOCK_POSITION, INSTANCE_NAME)
    await conn.execute(SQL_ANNOUNCE_REMOVED, INSTANCE_NAME, room_id, REMOVED, kind, list(ids))
