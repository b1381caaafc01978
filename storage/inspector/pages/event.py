"""An event: bytes, edges, auth chain, states, verdict, redactions, relations, and its readers.

Reads: `Store.event`, `Store.auth_chain_ids`, `Store.explain_visibility`, and of
`storage.queries.inspect`: `lines`, `edges`, `state_path`, `readers`.
"""

from collections.abc import Sequence
from typing import Any, Final

from starlette.responses import Response

from storage.database.names import MEMBERSHIP_NAMES
from storage.errors import UnknownEvent
from storage.ids import EventId
from storage.inspector.headers import data_headers
from storage.inspector.visit import ContentRefusedError, Visit
from storage.queries.inspect.edges import edges
from storage.queries.inspect.lines import EventLine, lines_by_id
from storage.queries.inspect.readers import READERS_MAX, readers
from storage.queries.inspect.state_path import EventGroupsRow, PathStep, groups_of, state_path

CHAIN_SHOWN: Final = 100


async def line_of(visit: Visit, event_id: EventId) -> EventLine:
    """Return an event without its content. `UnknownEvent`."""
    line = (await visit.read(lines_by_id, [event_id])).get(event_id)
    if line is None:
        raise UnknownEvent(event_id)
    return line


async def page(visit: Visit) -> Response:
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
            "x": 4 + 30 * place,
            "y": 4 if step.level is None else 30 + 24 * (levels - step.level),
            "step": step,
        }
        for place, step in enumerate(path)
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
