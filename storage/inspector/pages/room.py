"""A room: its numbers, its forward extremities and merges, and the graph of its events.

Reads: `storage.queries.inspect.rooms`, `lines` and `merges`; `Store.forward_extremities`. The graph
is a list of events in topological order, a window at a time. A script draws the edges beside it,
and loads the windows above and below.
"""

from typing import Final

from starlette.responses import Response

from storage.errors import InputError, UnknownRoom
from storage.ids import RoomId
from storage.inspector.visit import Visit
from storage.queries.inspect.lines import BOTTOM, TOP, EventLine, Place, lines_by_id, window
from storage.queries.inspect.merges import SCANNED_MAX, merges
from storage.queries.inspect.rooms import RoomLine, rooms_by_id

WINDOW: Final = 100
MERGES_SHOWN: Final = 5
EXTREMITIES_SHOWN: Final = 20


async def line_of(visit: Visit, room_id: RoomId) -> RoomLine:
    """Return the numbers of a room. `UnknownRoom`."""
    found = await visit.read(rooms_by_id, [room_id])
    if not found:
        raise UnknownRoom(room_id)
    return found[0]


async def page(visit: Visit) -> Response:
    room_id, content = visit.room(), visit.content()
    room = await line_of(visit, room_id)
    extremities = await visit.store.forward_extremities(room_id)
    shown = sorted(extremities)[:EXTREMITIES_SHOWN]
    found = await visit.read(merges, room_id)
    lines = await _window(visit, room_id)
    return visit.render(
        "room.html",
        room=room,
        room_id=room_id,
        lines=lines,
        extremities=(await visit.read(lines_by_id, shown)).values(),
        merges=[merge for merge in found if merge.states > 1][:MERGES_SHOWN],
        merge_count=len(found),
        scanned=SCANNED_MAX,
        at=visit.whole("at"),
        contents=await contents_of(visit, lines) if content else {},
        shown_content=content,
        tab="graph",
    )


async def rows(visit: Visit) -> Response:
    """Return the rows of a window, for the graph."""
    room_id, content = visit.room(), visit.content()
    lines = await _window(visit, room_id)
    return visit.fragment(
        "rows.html", lines=lines, contents=await contents_of(visit, lines) if content else {}
    )


async def contents_of(visit: Visit, lines: list[EventLine]) -> dict[str, object]:
    """Return the contents of these events, as clients would get them."""
    events = await visit.store.events([line.event_id for line in lines])
    return {event_id: event.content for event_id, event in events.items()}


async def _window(visit: Visit, room_id: RoomId) -> list[EventLine]:
    """Return the window of the parameters: at a position, below or above one, or the latest."""
    at = visit.whole("at")
    above, below = _place(visit, "above"), _place(visit, "below")
    if above is not None:
        return await visit.read(window, room_id, above, direction="above", limit=WINDOW)
    if at is not None:
        below = (min(at, TOP[0] - 1) + 1, BOTTOM[1])
    return await visit.read(window, room_id, below or TOP, limit=WINDOW)


def _place(visit: Visit, name: str) -> Place | None:
    """Return a position: topological and stream ordering, with a dot between. `InputError`."""
    given = visit.text(name)
    if given is None:
        return None
    parts = given.split(".")
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise InputError(f"{name} is {given!r}: a position is wanted, such as 7.12")
    topological, stream = (min(int(part[:20]), TOP[0]) for part in parts)
    return topological, stream
