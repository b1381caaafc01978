"""Delete connections of sliding sync that are not in use; their clients begin new ones.

A transaction takes a few connections. Its first statement locks them, so no request is writing when
the second one deletes them with their rooms.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final, LiteralString

from storage.database.connection import Connection, Database

BATCH: Final = 20  # connections, of some thousands of rooms each

SQL_LOCK_UNUSED: Final[LiteralString] = """
SELECT connection_nid
FROM sliding_connections
WHERE used_ts < $1::bigint
ORDER BY used_ts
LIMIT $2::bigint
FOR UPDATE SKIP LOCKED
"""

SQL_DELETE_CONNECTIONS: Final[LiteralString] = """
WITH
room AS (
    DELETE FROM sliding_rooms
    WHERE connection_nid = ANY($1::bigint[])
)
DELETE FROM sliding_connections
WHERE connection_nid = ANY($1::bigint[])
"""


async def delete_old_connections(
    database: Database, *, batch: int = BATCH, now_ms: int | None = None
) -> int:
    """Delete what was not in use for `Config.sliding_connection_keep_ms`; return how many.

    It pauses for `Config.purge_pause_ms` after each batch.
    """
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    before, deleted = now - database.config.sliding_connection_keep_ms, 0
    while True:
        gone = await database.run(lambda conn: _delete_batch(conn, before, batch))
        if not gone:
            return deleted
        deleted += gone
        await asyncio.sleep(database.config.purge_pause_ms / 1000)


async def _delete_batch(conn: Connection, before: int, batch: int) -> int:
    nids: list[int] = await conn.fetchvals(SQL_LOCK_UNUSED, before, batch)
    await delete_connections(conn, nids)
    return len(nids)


async def delete_connections(conn: Connection, nids: Sequence[int]) -> None:
    """Delete connections that are locked, with their rooms."""
    if nids:
        await conn.execute(SQL_DELETE_CONNECTIONS, list(nids))
