"""Clocks, which may be wrong: a machine that starts in 1970, or one that is a day ahead.

Maintenance that deletes by time takes the earlier one of two clocks, so that a clock that is ahead
deletes nothing early.
"""

import logging
import time
from typing import Final, LiteralString

from storage.database.connection import Connection

logger: logging.Logger = logging.getLogger(__name__)

TOLERANCE_MS: Final = 60_000
"""So much may times differ that were taken at once, or one after the other."""

SQL_DATABASE_CLOCK: Final[LiteralString] = """
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint
"""


def now_ms() -> int:
    """Return the time of this process in milliseconds."""
    return time.time_ns() // 1_000_000


async def earlier_now_ms(conn: Connection) -> int:
    """Return the time by the clock of this process or of Postgres, whichever is earlier.

    Log a warning if they differ by more than `TOLERANCE_MS`.
    """
    here, there = now_ms(), int(await conn.fetchval(SQL_DATABASE_CLOCK))
    if abs(here - there) > TOLERANCE_MS:
        logger.warning(
            "the clock of this process and that of Postgres differ by %d s: the earlier one counts",
            abs(here - there) // 1000,
        )
    return min(here, there)
