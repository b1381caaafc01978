"""A room: its numbers, its forward extremities and merges, and the graph of its events.

Reads: `storage.queries.inspect.rooms`, `lines` and `merges`; `Store.forward_extremities`. The graph
is a list of events in topological order, a window at a time. A script draws the edges beside it,
and loads the windows above and below.
"""

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from starlette.responses import RedirectResponse, Response

from storage import arguments as args
from storage.errors import InputError, UnknownRoom
from storage.ids import EventId, RoomId, StateKey
from storage.inspector.access import data_headers
from storage.inspector.visit import Visit
from storage.queries.inspect.lines import (
    BOTTOM,
    HISTORY_SCANNED_MAX,
    MERGES_SCANNED_MAX,
    TOP,
    EventLine,
    WindowPosition,
    key_history,
    lines_by_id,
    merges,
    outliers,
    window,
)
from storage.queries.inspect.resolution import KeyReason, resolution_at, resolution_now, verdict
from storage.queries.inspect.rooms import (
    WEEK_MS,
    RoomLine,
    Size,
    largest_rooms,
    positions_at,
    recent_rooms,
    room_growth,
    room_weeks,
    rooms_after,
    rooms_by_id,
    week_begins,
)
from storage.queries.state_at import StateMap

WINDOW: Final = 100
MERGES_SHOWN: Final = 5
EXTREMITIES_SHOWN: Final = 20


async def line_of(visit: Visit, room_id: RoomId) -> RoomLine:
    """Return the numbers of a room. `UnknownRoom`."""
    lines = await visit.read(rooms_by_id, [room_id])
    if not lines:
        raise UnknownRoom(room_id)
    return lines[0]


async def room_page(visit: Visit) -> Response:
    room_id, content = visit.room(), visit.content()
    room = await line_of(visit, room_id)
    extremities = await visit.store.forward_extremities(room_id)
    shown = sorted(extremities)[:EXTREMITIES_SHOWN]
    room_merges = await visit.read(merges, room_id)
    lines = await _window(visit, room_id)
    return visit.render(
        "room.html",
        room=room,
        room_id=room_id,
        lines=lines,
        extremities=(await visit.read(lines_by_id, shown)).values(),
        merges=[merge for merge in room_merges if merge.states > 1][:MERGES_SHOWN],
        merge_count=len(room_merges),
        scanned=MERGES_SCANNED_MAX,
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
    upper, lower = _position(visit, "above"), _position(visit, "below")
    if upper is not None:
        return await visit.read(window, room_id, upper, direction="above", limit=WINDOW)
    if at is not None:
        lower = (min(at, TOP[0] - 1) + 1, BOTTOM[1])
    return await visit.read(window, room_id, lower or TOP, limit=WINDOW)


def _position(visit: Visit, name: str) -> WindowPosition | None:
    """Return a position: topological and stream ordering, with a dot between. `InputError`."""
    text = visit.text(name)
    if text is None:
        return None
    parts = text.split(".")
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise InputError(f"{name} is {text!r}: a position is wanted, such as 7.12")
    topological, stream = (min(int(part[:20]), TOP[0]) for part in parts)
    return topological, stream


# --------------------------------------------------------------------------------------------------
# A state: of a room now, at an event, or the difference of the states after two events.
#
# Reads: `Store.current_state`, `Store.state_before`, `Store.state_after`, `Store.states_after`; the
# shown events from `storage.queries.inspect.lines`. A state is read whole, and shown in parts.

SHOWN: Final = 200


class StateEntry(NamedTuple):
    """A key, its value, and in a difference the value before: None for no value."""

    key: StateKey
    before: EventId | None
    after: EventId | None


async def state_page(visit: Visit) -> Response:
    """Show a state, or a difference."""
    before, after, what = await _requested_states(visit)
    entries = _entries(before, after, visit.text("q") or "")
    offset = visit.whole("offset") or 0
    shown, content = entries[offset : offset + SHOWN], visit.content()
    lines = await _lines(visit, shown)
    return visit.render(
        "state.html",
        entries=shown,
        count=len(entries),
        total=len(after),
        offset=offset,
        step=SHOWN,
        lines=lines,
        contents=await contents_of(visit, list(lines.values())) if content else {},
        is_difference=before is not None,
        shown_content=content,
        **what,
    )


async def _requested_states(visit: Visit) -> tuple[StateMap | None, StateMap, dict[str, Any]]:
    """Return the state before (None: no difference), the state, and what it is."""
    store = visit.store
    what: dict[str, Any] = dict.fromkeys(("room_id", "event_id", "when", "other"))
    if visit.text("room") is not None:
        room_id = visit.room("room")
        return None, await store.current_state(room_id), {**what, "room_id": room_id}
    event_id, when = visit.event("event"), visit.text("when") or "after"
    what |= {"event_id": event_id, "when": when}
    if visit.text("other") is not None:
        other = args.event(visit.required("other"))
        states = await store.states_after([event_id, other])
        return states[event_id], states[other], {**what, "other": other}
    if when == "change":
        before, after = await store.state_before(event_id), await store.state_after(event_id)
        return before, after, what
    if when not in {"before", "after"}:
        raise InputError(f"when is {when!r}: before, after or change is wanted")
    read = store.state_before if when == "before" else store.state_after
    return None, await read(event_id), what


def _entries(before: StateMap | None, after: StateMap, text: str) -> list[StateEntry]:
    """Return the entries, or in a difference those that differ, whose key has a text in it."""
    old = before or {}
    keys = after.keys() if before is None else old.keys() | after.keys()
    return [
        StateEntry(key, old.get(key), after.get(key))
        for key in sorted(keys)
        if (before is None or old.get(key) != after.get(key)) and (text in key[0] or text in key[1])
    ]


async def _lines(visit: Visit, entries: list[StateEntry]) -> dict[EventId, EventLine]:
    ids = {
        event_id
        for entry in entries
        for event_id in (entry.before, entry.after)
        if event_id is not None
    }
    return await visit.read(lines_by_id, sorted(ids))


# --------------------------------------------------------------------------------------------------
# The other pages of a room: changes of its state, gaps, growth by week, outliers.
#
# Reads: `storage.queries.inspect.lines`, `growth` and `lines`; `Store.gaps`.

CHANGES_SHOWN: Final = 200
GAPS_SHOWN: Final = 100
WEEKS: Final = 12


async def changes(visit: Visit) -> Response:
    """Show the changes of the current state, of all keys or of one."""
    room_id, type_ = visit.room(), visit.text("type")
    state_key = visit.parameters.get("key")
    visit.text("key")  # checked
    room = await line_of(visit, room_id)
    history = await visit.read(key_history, room_id, type_, state_key, limit=CHANGES_SHOWN)
    return visit.render(
        "changes.html",
        room=room,
        room_id=room_id,
        changes=history,
        type=type_,
        state_key=state_key,
        limit=CHANGES_SHOWN,
        scanned=HISTORY_SCANNED_MAX,
        tab="changes",
    )


async def gaps(visit: Visit) -> Response:
    """Show the missing parents of stored events."""
    room_id = visit.room()
    room, room_gaps = await line_of(visit, room_id), await visit.store.gaps(room_id)
    return visit.render(
        "gaps.html",
        room=room,
        room_id=room_id,
        gaps=room_gaps[:GAPS_SHOWN],
        count=len(room_gaps),
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


# --------------------------------------------------------------------------------------------------
# The first page: rooms, a search, and the three questions.
#
# Reads: `storage.queries.inspect.rooms`; the names, if asked for, from `Store.rooms`.

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


async def rooms_page(visit: Visit) -> Response:
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


# --------------------------------------------------------------------------------------------------
# A resolution replayed: which branch a merge preferred and why, and each check in its order.
#
# Reads: `storage.queries.inspect.resolution`; the sentences are those of `reasons`.

STEPS_SHOWN: Final = 500
KEYS_SHOWN: Final = 200
EVENTS_SHOWN: Final = 500


async def resolution_page(visit: Visit) -> Response:
    """Show the resolution of the state before an event, or of the state of a room now.

    The form takes a room id, too: it leads to the merges of the room.
    """
    if (visit.text("event") or "").startswith("!"):
        merges = f"{visit.links('/room', id=visit.room('event'))}#merges"
        return RedirectResponse(merges, 303, data_headers())
    event_id = None if visit.text("event") is None else visit.event("event")
    resolution = (
        await visit.read(resolution_now, visit.room("room"))
        if event_id is None
        else await visit.read(resolution_at, event_id)
    )
    decision, replay, content = verdict(resolution), resolution.replay, visit.content()
    keys = decision.keys[:KEYS_SHOWN]
    return visit.render(
        "resolution.html",
        event_id=event_id,
        found=resolution,
        verdict=decision,
        keys=keys,
        contents=await _contents(visit, keys) if content else {},
        shown_content=content,
        of_branches=set().union(*(() if replay is None else replay.conflicted.values())),
        steps=[] if replay is None else replay.steps[:STEPS_SHOWN],
        difference_ids=frozenset() if replay is None else replay.difference,
        full=[] if replay is None else sorted(replay.full)[:EVENTS_SHOWN],
        full_count=0 if replay is None else len(replay.full),
        difference=[] if replay is None else sorted(replay.difference)[:EVENTS_SHOWN],
        tips=await visit.read(lines_by_id, resolution.tips),
    )


async def _contents(visit: Visit, keys: Sequence[KeyReason]) -> dict[str, Any]:
    values = {value for key in keys for value in key.values.values() if value is not None}
    lines = await visit.read(lines_by_id, sorted(values))
    return await contents_of(visit, list(lines.values()))
