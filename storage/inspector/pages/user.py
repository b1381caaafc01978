"""A user: rooms, the audiences of each as ranges on a line, and what a sync would return.

Reads: `Store.memberships_of`, `Store.sync`; `audiences` and `search` of `storage.queries.inspect`.
"""

from collections.abc import Sequence
from typing import Any, Final

from starlette.responses import Response

from storage import arguments as args
from storage.ids import RoomId, UserId, server_name_of
from storage.inspector.visit import Visit
from storage.queries.explain_visibility import is_known
from storage.queries.inspect.audiences import PrincipalRangeRow, audience_ranges
from storage.queries.sync.types import JoinedRoom

ROOMS_SHOWN: Final = 100
LINE: Final = 1_000
"""The width of the picture of ranges."""

SYNC_ROOMS_MAX: Final = 20
TIMELINE: Final = 10


async def page(visit: Visit) -> Response:
    """Show a user of any server."""
    user_id = args.user(visit.wanted("id"))
    is_local = server_name_of(user_id) == visit.store.server_name
    memberships = await visit.store.memberships_of(user_id, args.MEMBERSHIPS)
    rooms = sorted(memberships)[:ROOMS_SHOWN]
    ranges = await visit.read(audience_ranges, user_id, rooms) if is_local else []
    return visit.render(
        "user.html",
        user_id=user_id,
        is_local=is_local,
        is_known=await visit.read(is_known, user_id),
        rooms=[(room_id, memberships[room_id]) for room_id in rooms],
        room_count=len(memberships),
        lines={room_id: _line(room_id, ranges) for room_id in rooms},
        since=visit.text("since"),
        sync_rooms_max=SYNC_ROOMS_MAX,
        sync=await _sync(visit, user_id) if is_local and "sync" in visit.parameters else None,
    )


def _line(room_id: RoomId, ranges: Sequence[PrincipalRangeRow]) -> list[dict[str, Any]]:
    """Return the ranges of a room as parts of a line: its history from left to right."""
    own = [row for row in ranges if row.room_id == room_id]
    return [_part(row) for row in own]


def _part(row: PrincipalRangeRow) -> dict[str, Any]:
    whole = max(row.max_topological_ordering, 1)
    first = min(row.first_topological or 0, whole)
    end = whole if row.end_topological is None else min(row.end_topological, whole)
    x = first * LINE // whole
    return {
        "row": row,
        "first": first,
        "end": None if row.end_topological is None else end,
        "x": x,
        "width": max(end * LINE // whole - x, 4),
    }


async def _sync(visit: Visit, user_id: UserId) -> dict[str, Any]:
    """Return what a sync from a token has, without content: counts and ids by room."""
    since = visit.text("since")
    answer = await visit.store.sync(
        user_id, since=since, timeline_limit=TIMELINE, rooms_limit=None if since else SYNC_ROOMS_MAX
    )
    return {
        "next_batch": answer.next_batch,
        "has_more_rooms": answer.next_rooms is not None,
        "rooms": [
            _synced(section, room_id, room)
            for section, rooms in (("join", answer.join), ("leave", answer.leave))
            for room_id, room in rooms.items()
        ],
        "others": {"invited": list(answer.invite), "knocking": list(answer.knock)},
    }


def _synced(section: str, room_id: RoomId, room: JoinedRoom) -> dict[str, Any]:
    """Return a room of a sync, without content."""
    return {
        "section": section,
        "room_id": room_id,
        "events": room.timeline.events,
        "limited": room.timeline.limited,
        "state": room.state,
        "removed": room.state_removed,
    }
