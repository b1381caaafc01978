"""Delete old transaction ids: no client repeats its request by then.

Batches go by event nid, which has an index. Nids of several processes are in no order of time, so
each row is read. There are as many as local users sent events in `Config.transaction_keep_ms`.
"""

import asyncio
import time
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Database

BATCH: Final = 10_000  # rows read by one statement

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
    database: Database, *, batch: int = BATCH, now_ms: int | None = None
) -> int:
    """Delete what is older than `Config.transaction_keep_ms`; return the number of rows.

    It pauses for `Config.purge_pause_ms` after each batch that deleted something.
    """
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    before, after, deleted = now - database.config.transaction_keep_ms, 0, 0
    while True:
        async with database.connection() as conn:
            done = await conn.fetchrow(SQL_DELETE_OLD, after, batch, before, row=OldTransactionsRow)
        if done is None or done.last_nid is None:
            return deleted
        after, deleted = done.last_nid, deleted + done.deleted
        if done.deleted:
            await asyncio.sleep(database.config.purge_pause_ms / 1000)
