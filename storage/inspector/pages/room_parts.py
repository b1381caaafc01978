"""The other pages of a room: changes of its state, gaps, growth by week, outliers.

Reads: `storage.queries.inspect.key_history`, `growth` and `lines`; `Store.gaps`.
"""

import time
from typing import Final

from starlette.responses import Response

from storage.inspector.pages.room import line_of
from storage.inspector.visit import Visit
from storage.queries.inspect.growth import (
    WEEK_MS,
    positions_at,
    room_growth,
    room_weeks,
    week_begins,
)
from storage.queries.inspect.key_history import SCANNED_MAX, key_history
from storage.queries.inspect.lines import outliers

CHANGES_SHOWN: Final = 200
GAPS_SHOWN: Final = 100
WEEKS: Final = 12


async def changes(visit: Visit) -> Response:
    """Show the changes of the current state, of all keys or of one."""
    room_id, type_ = visit.room(), visit.text("type")
    state_key = visit.parameters.get("key")
    visit.text("key")  # checked
    room = await line_of(visit, room_id)
    found = await visit.read(key_history, room_id, type_, state_key, limit=CHANGES_SHOWN)
    return visit.render(
        "changes.html",
        room=room,
        room_id=room_id,
        changes=found,
        type=type_,
        state_key=state_key,
        limit=CHANGES_SHOWN,
        scanned=SCANNED_MAX,
        tab="changes",
    )


async def gaps(visit: Visit) -> Response:
    """Show the missing parents of stored events."""
    room_id = visit.room()
    room, found = await line_of(visit, room_id), await visit.store.gaps(room_id)
    return visit.render(
        "gaps.html",
        room=room,
        room_id=room_id,
        gaps=found[:GAPS_SHOWN],
        count=len(found),
        tab="gaps",
    )


async def weeks(visit: Visit) -> Response:
    """Show the new events of each of the last weeks, and what else arrived in this week."""
    room_id = visit.room()
    room = await line_of(visit, room_id)
    begins = week_begins(time.time_ns() // 1_000_000, WEEKS)
    *boundaries, end = await visit.read(positions_at, [*begins, begins[-1] + 2 * WEEK_MS])
    counts = await visit.read(room_weeks, room_id, boundaries)
    this_week = await visit.read(room_growth, boundaries[-1], end, room_id=room_id)
    return visit.render(
        "weeks.html",
        room=room,
        room_id=room_id,
        weeks=list(zip(begins, counts, strict=True))[::-1],
        most=max((count or 0 for count in counts), default=0),
        this_week=this_week.rooms[0] if this_week.rooms else None,
        is_exact=this_week.is_exact,
        tab="growth",
    )


async def outliers_page(visit: Visit) -> Response:
    """Show some outliers of the room."""
    room_id = visit.room()
    room, lines = await line_of(visit, room_id), await visit.read(outliers, room_id)
    return visit.render("outliers.html", room=room, room_id=room_id, lines=lines, tab="outliers")
