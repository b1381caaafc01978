"""Delete connections of sliding sync that are not in use; their clients begin new ones.

A transaction takes a few connections. Its first statement locks them, so no request is writing when
the second one deletes them with their rooms.
"""

import time
from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.database.pace import Pace, in_batches

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
    before = now - database.config.sliding_connection_keep_ms

    async def delete() -> int | None:
        return await database.run(lambda conn: _delete_batch(conn, before, batch)) or None

    return await in_batches(delete, Pace(database.config.purge_pause_ms / 1000))


async def _delete_batch(conn: Connection, before: int, batch: int) -> int:
    nids: list[int] = await conn.fetchvals(SQL_LOCK_UNUSED, before, batch)
    await delete_connections(conn, nids)
    return len(nids)


async def delete_connections(conn: Connection, nids: Sequence[int]) -> None:
    """Delete connections that are locked, with their rooms."""
    if nids:
        await conn.execute(SQL_DELETE_CONNECTIONS, list(nids))


# --------------------------------------------------------------------------------------------------
# Delete old transaction ids: no client repeats its request by then.
#
# Batches go by event nid, which has an index. Nids of several processes are in no order of time, so
# each row is read. There are as many as local users sent events in `Config.transaction_keep_ms`.

TRANSACTIONS_BATCH: Final = 10_000  # rows read by one statement

SQL_DELETE_OLD: Final[LiteralString] = """
WITH
part AS MATERIALIZED (
    SELECT event_nid, sent_ts
    FROM local_transactions
    WHERE event_nid > $1::bigint
    ORDER BY event_nid
    LIMIT $2::bigint
),
gone AS (
    DELETE FROM local_transactions
    WHERE event_nid = ANY(ARRAY(SELECT event_nid FROM part WHERE sent_ts < $3::bigint))
    RETURNING 1
)
SELECT (SELECT max(event_nid) FROM part) AS last_nid, (SELECT count(*) FROM gone) AS deleted
"""


class OldTransactionsRow(NamedTuple):
    """The last row of a batch (None at the end), and the number of deleted ones."""

    last_nid: int | None
    deleted: int


async def delete_old_transactions(
    database: Database, *, batch: int = TRANSACTIONS_BATCH, now_ms: int | None = None
) -> int:
    """Delete what is older than `Config.transaction_keep_ms`; return the number of rows.

    It pauses for `Config.purge_pause_ms` after each batch that deleted something.
    """
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    before, after = now - database.config.transaction_keep_ms, 0

    async def delete() -> int | None:
        nonlocal after
        async with database.connection() as conn:
            done = await conn.fetchrow(SQL_DELETE_OLD, after, batch, before, row=OldTransactionsRow)
        if done is None or done.last_nid is None:
            return None
        after = done.last_nid
        return done.deleted

    return await in_batches(delete, Pace(database.config.purge_pause_ms / 1000))


# --------------------------------------------------------------------------------------------------
# Find rows written since an earlier read, by the transactions that wrote them.
#
# Rows with `age(xmin) <= age(horizon)` may be new; all others were visible to the read. This is for
# tables whose rows have no position that grows, such as outliers and state groups. Their numbers
# come in blocks, and released blocks are reused. The result also includes rows that were only
# updated since, and rows of transactions that were running during the read.

SQL_HORIZON: Final[LiteralString] = """
SELECT pg_snapshot_xmin(pg_current_snapshot())::xid::text
"""


async def xmin_horizon(conn: Connection) -> str:
    """Return the oldest transaction (xid) whose rows this snapshot may lack.

    Call it before the read, or in its snapshot.
    """
    return str(await conn.fetchval(SQL_HORIZON))
