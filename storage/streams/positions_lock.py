"""The lock under which a writer enters: running writes end, and none begins.

A write that waits for a table lock waits behind every request for it that came earlier. So a
process that enters while a long transaction writes would stop all other writers until its end. It
therefore waits for a short time only, and lets the others pass before it tries again.
"""

import asyncio
import time
from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.errors import DatabaseConflict

PAUSE_SECONDS: Final = 0.2
"""Pause between two tries, in which the writes that have queued up can run."""

SQL_LOCK: Final[LiteralString] = """
LOCK TABLE stream_positions IN SHARE ROW EXCLUSIVE MODE
"""

SQL_LOCK_TIMEOUT: Final[LiteralString] = """
SELECT setting::bigint FROM pg_settings WHERE name = 'lock_timeout'
"""

SQL_SET_LOCK_TIMEOUT: Final[LiteralString] = """
SELECT set_config('lock_timeout', $1::text, true)
"""

SQL_BEGIN_TRY: Final[LiteralString] = "SAVEPOINT lock_positions"
SQL_END_TRY: Final[LiteralString] = "RELEASE SAVEPOINT lock_positions"
SQL_UNDO_TRY: Final[LiteralString] = "ROLLBACK TO SAVEPOINT lock_positions"

LOCK_TRY_MS: Final = 200
"""Longest time for which one try keeps other writers waiting."""


async def lock_positions(conn: Connection) -> None:
    """Lock `stream_positions` until the end of the transaction.

    Raise `DatabaseConflict` if a write has kept it locked for `Config.lock_timeout_ms`, 0 for ever.
    """
    most = int(await conn.fetchval(SQL_LOCK_TIMEOUT))
    deadline = time.monotonic() + most / 1000
    while True:
        left = int((deadline - time.monotonic()) * 1000) if most else LOCK_TRY_MS
        try:
            return await _try(conn, max(1, min(LOCK_TRY_MS, left)), most)
        except DatabaseConflict:
            if most and time.monotonic() + PAUSE_SECONDS >= deadline:
                raise
            await conn.execute(SQL_UNDO_TRY)
            await asyncio.sleep(PAUSE_SECONDS)


async def _try(conn: Connection, wait_ms: int, then_ms: int) -> None:
    """Lock within a time limit; ``then_ms`` is the one of later statements."""
    await conn.execute(SQL_BEGIN_TRY)
    await conn.execute(SQL_SET_LOCK_TIMEOUT, str(wait_ms))
    await conn.execute(SQL_LOCK)
    await conn.execute(SQL_SET_LOCK_TIMEOUT, str(then_ms))
    await conn.execute(SQL_END_TRY)
