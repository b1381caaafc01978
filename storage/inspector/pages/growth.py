"""Growth: the rooms with most new events this week, and the weeks of the whole store.

Reads: `storage.queries.inspect.growth`; sizes from `storage.database.sizes`.
"""

import time
from typing import Final

from starlette.responses import Response

from storage.database.sizes import database_bytes
from storage.inspector.visit import Visit
from storage.queries.inspect.growth import WEEK_MS, positions_at, room_growth, week_begins

WEEKS: Final = 8
ROOMS_SHOWN: Final = 30


async def page(visit: Visit) -> Response:
    """Show the growth of this week, compared with the week before."""
    begins = week_begins(time.time_ns() // 1_000_000, WEEKS)
    *positions, end = await visit.read(positions_at, [*begins, begins[-1] + 2 * WEEK_MS])
    this_week = await visit.read(room_growth, positions[-1], end, limit=ROOMS_SHOWN)
    before = await visit.read(room_growth, positions[-2], positions[-1], limit=10 * ROOMS_SHOWN)
    ends = [*positions[1:], end]
    weeks = [last - first for first, last in zip(positions, ends, strict=True)]
    return visit.render(
        "growth.html",
        this_week=this_week,
        before={row.room_id: row.events for row in before.rooms},
        before_is_whole=before.is_exact and len(before.rooms) < 10 * ROOMS_SHOWN,
        weeks=list(zip(begins, weeks, strict=True))[::-1],
        most=max(weeks),
        since=begins[-1],
        database_bytes=await visit.read(database_bytes),
    )
