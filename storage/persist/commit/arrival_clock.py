"""The time at which events are received, and a watch on the clock that says it.

A clock that goes back is noticed at the next write: one line in the log, and a count. The time is
stored as the clock says it. A purge recognises such events by those around them
(`storage.maintenance.purge.cut_point`).
"""

import logging
from datetime import UTC, datetime
from typing import Final, LiteralString

from storage.database.clocks import TOLERANCE_MS, now_ms
from storage.database.connection import Connection
from storage.observability.counters import Measures

logger: logging.Logger = logging.getLogger(__name__)

SQL_LAST_RECEIVED: Final[LiteralString] = """
SELECT received_ts
FROM events
WHERE stream_ordering IS NOT NULL
ORDER BY stream_ordering DESC
LIMIT 1
"""


def arrival_ms(measures: Measures) -> int:
    """Return the time for a write; log a warning if the clock went back since the last one."""
    before, now = measures.last_received_ms, now_ms()
    measures.last_received_ms = now
    if before - now > TOLERANCE_MS:
        measures.clock_steps_back += 1
        logger.warning(
            "the clock went back by %d s, to %s: it is wrong now, or was wrong before; "
            "events keep the time at which they were received, and purges by time allow for it",
            (before - now) // 1000,
            datetime.fromtimestamp(now / 1000, UTC).isoformat(timespec="seconds"),
        )
    return now


async def last_received_ms(conn: Connection) -> int:
    """Return when the last event was received, by any process; 0 if there is none."""
    return int(await conn.fetchval(SQL_LAST_RECEIVED) or 0)
