"""An event: bytes, edges, auth chain, states, verdict, redactions, relations, and its readers.

Reads: `Store.event`, `Store.auth_chain_ids`, `Store.explain_visibility`, and of
`storage.queries.inspect`: `lines`, `edges`, `state_path`, `readers`.
"""

from collections.abc import Sequence
from typing import Any, Final

from starlette.responses import RedirectResponse, Response

from storage import arguments as args
from storage.database.names import MEMBERSHIP_NAMES
from storage.errors import UnknownEvent
from storage.ids import EventId, RoomId, StateKey, UserId, server_name_of
from storage.inspector.access import data_headers
from storage.inspector.visit import ContentRefusedError, Visit
from storage.queries.explain_visibility import is_reader_stored
from storage.queries.inspect.lines import (
    READERS_MAX,
    EventLine,
    PrincipalRangeRow,
    audience_ranges,
    edges,
    lines_by_id,
    readers,
)
from storage.queries.inspect.resolution import EventGroupsRow, PathStep, groups_of, state_path
from storage.queries.inspect.rooms import events_called, rooms_by_alias, rooms_like, users_like
from storage.queries.state_at import states_at
from storage.queries.sync.types import JoinedRoom

CHAIN_SHOWN: Final = 100


async def line_of(visit: Visit, event_id: EventId) -> EventLine:
    """Return an event without its content. `UnknownEvent`."""
    line = (await visit.read(lines_by_id, [event_id])).get(event_id)
    if line is None:
        raise UnknownEvent(event_id)
    return line


async def event_page(visit: Visit) -> Response:
    event_id, content = visit.event(), visit.content()
    line = await line_of(visit, event_id)
    chain = sorted(await visit.store.auth_chain_ids([event_id]))
    groups = await visit.read(groups_of, event_id)
    path = await _path(visit, groups)
    return visit.render(
        "event.html",
        line=line,
        event_id=event_id,
        edges=await visit.read(edges, event_id),
        chain=list((await visit.read(lines_by_id, chain[:CHAIN_SHOWN])).values())[::-1],
        chain_count=len(chain),
        groups=groups,
        path=path,
        drawing=drawing_of(path),
        membership=MEMBERSHIP_NAMES.get(line.membership or 0),
        readers=await visit.read(readers, event_id),
        readers_max=READERS_MAX,
        shown_content=content,
        **await _content(visit, event_id, shown=content),
    )


async def _content(visit: Visit, event_id: EventId, *, shown: bool) -> dict[str, Any]:
    """Return the event as received and as served, if asked for."""
    if not shown:
        return {"raw": None, "served": None}
    event = await visit.store.event(event_id)
    if event is None:
        raise UnknownEvent(event_id)
    return {"raw": event.raw.decode("utf-8", "replace"), "served": event.json}


async def _path(visit: Visit, groups: EventGroupsRow | None) -> list[PathStep]:
    if groups is None or groups.state_group_after is None:
        return []
    return await visit.read(state_path, groups.state_group_after)


def drawing_of(path: Sequence[PathStep]) -> dict[str, Any]:
    """Return the numbers of the picture of a path: a box for each row, lower for a lower level."""
    levels = max((step.level or 0 for step in path), default=0)
    boxes = [
        {
            "x": 4 + 30 * index,
            "y": 4 if step.level is None else 30 + 24 * (levels - step.level),
            "step": step,
        }
        for index, step in enumerate(path)
    ]
    return {"boxes": boxes, "width": 8 + 30 * len(path), "height": 56 + 24 * levels}


async def raw(visit: Visit) -> Response:
    """Return the bytes of an event as a file, as they were received. It counts as content."""
    event_id = visit.event()
    if not visit.content():
        raise ContentRefusedError
    event = await visit.store.event(event_id, redact=False)
    if event is None:
        raise UnknownEvent(event_id)
    headers = data_headers() | {"Content-Disposition": 'attachment; filename="event.json"'}
    return Response(event.raw, 200, headers, "application/octet-stream")


# --------------------------------------------------------------------------------------------------
# A user: rooms, the audiences of each as ranges on a line, and what a sync would return.
#
# Reads: `Store.memberships_of`, `Store.sync`; `audiences` and `search` of
# `storage.queries.inspect`.

ROOMS_SHOWN: Final = 100
LINE: Final = 1_000
"""The width of the picture of ranges."""

SYNC_ROOMS_MAX: Final = 20
TIMELINE: Final = 10


async def user_page(visit: Visit) -> Response:
    """Show a user of any server."""
    user_id = args.user(visit.required("id"))
    is_local = server_name_of(user_id) == visit.store.server_name
    memberships = await visit.store.memberships_of(user_id, args.MEMBERSHIPS)
    rooms = sorted(memberships)[:ROOMS_SHOWN]
    ranges = await visit.read(audience_ranges, user_id, rooms) if is_local else []
    return visit.render(
        "user.html",
        user_id=user_id,
        is_local=is_local,
        is_reader_stored=await visit.read(is_reader_stored, user_id),
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


# --------------------------------------------------------------------------------------------------
# Why a user or server may see an event, or may not: one sentence, and the facts behind it.
#
# Reads: `Store.explain_visibility`; the event that set the visibility, from the state before.

VISIBILITY: Final[StateKey] = ("m.room.history_visibility", "")


async def why_page(visit: Visit) -> Response:
    """Show the sentence of an event and a reader; without a reader, a form."""
    event_id, reader = visit.text("event"), visit.text("reader")
    if event_id is None or reader is None:
        return visit.render(
            "why.html",
            event_id=event_id,
            reader=reader,
            explanation=None,
            line=None,
            set_by=None,
        )
    explanation = await visit.store.explain_visibility(event_id, reader)
    line = await line_of(visit, explanation.event_id)
    return visit.render(
        "why.html",
        event_id=event_id,
        reader=reader,
        explanation=explanation,
        line=line,
        set_by=await _set_by(visit, line),
    )


async def _set_by(visit: Visit, line: EventLine) -> EventId | None:
    """Return the event that set the history visibility before an event. None: it was not set."""
    if line.outlier:
        return None
    states = await visit.read(states_at, [line.event_id], after=False, keys=[VISIBILITY])
    return states[line.event_id].get(VISIBILITY)


# --------------------------------------------------------------------------------------------------
# Search: by event id, room id, alias or user id; a whole one leads to its page.
#
# Reads: `storage.queries.inspect.rooms`.


async def search_page(visit: Visit) -> Response:
    """Show what an id or its beginning stands for. Text without a sigil is of any kind."""
    query = visit.text("q") or ""
    events = rooms = users = []
    sigil = query[:1]
    if query and (sigil == "$" or sigil not in "!@#"):
        events = await visit.read(events_called, _with("$", query))
    if query and (sigil == "!" or sigil not in "$@#"):
        rooms = await visit.read(rooms_like, _with("!", query))
    if query and (sigil == "@" or sigil not in "$!#"):
        users = await visit.read(users_like, _with("@", query))
    if sigil == "#":
        rooms = [str(room) for room in await visit.read(rooms_by_alias, query)]
    matches = {"/event": events, "/room": rooms, "/user": users}
    for path, ids in matches.items():
        if query in ids or (sigil == "#" and len(ids) == 1):
            chosen = query if query in ids else ids[0]
            return RedirectResponse(visit.links(path, id=chosen), 303, data_headers())
    return visit.render("search.html", wanted=query, found=matches)


def _with(sigil: str, text: str) -> str:
    return text if text.startswith(sigil) else f"{sigil}{text}"
