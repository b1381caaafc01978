"""The first page: rooms, a search, and the three questions.

Reads: `storage.queries.inspect.rooms`; the names, if asked for, from `Store.rooms`.
"""

from typing import Final

from starlette.responses import Response

from storage.errors import InputError
from storage.ids import RoomId
from storage.inspector.visit import Visit
from storage.queries.inspect.rooms import (
    RoomLine,
    Size,
    largest_rooms,
    recent_rooms,
    rooms_after,
)

LIMIT: Final = 50
SIZES: Final[dict[str, Size]] = {
    "members": "members",
    "extremities": "extremities",
    "depth": "depth",
}
ORDERS: Final = {
    "active": "Active lately",
    "id": "By id",
    "members": "Most members",
    "extremities": "Most extremities",
    "depth": "Longest",
}


async def page(visit: Visit) -> Response:
    """Show a list of rooms."""
    order = visit.text("order") or "active"
    if order not in ORDERS:
        raise InputError(f"order is {order!r}: one of {', '.join(ORDERS)} is wanted")
    content = visit.content()
    rooms = await _rooms(visit, order)
    names = await visit.store.rooms([room.room_id for room in rooms]) if content else {}
    return visit.render(
        "rooms.html",
        rooms=rooms,
        order=order,
        orders=ORDERS,
        names={room_id: info.name for room_id, info in names.items()},
        shown_content=content,
        after=rooms[-1].room_id if order == "id" and len(rooms) == LIMIT else None,
    )


async def _rooms(visit: Visit, order: str) -> list[RoomLine]:
    if order == "id":
        return await visit.read(rooms_after, RoomId(visit.text("after") or ""), LIMIT)
    if order in SIZES:
        return await visit.read(largest_rooms, SIZES[order], LIMIT)
    return await visit.read(recent_rooms, LIMIT)
