"""A resolution replayed: which branch a merge preferred and why, and each check in its order.

Reads: `storage.queries.inspect.resolution`; the sentences are those of `reasons`.
"""

from collections.abc import Sequence
from typing import Any, Final

from starlette.responses import RedirectResponse, Response

from storage.inspector.headers import data_headers
from storage.inspector.pages.room import contents_of
from storage.inspector.visit import Visit
from storage.queries.inspect.lines import lines_by_id
from storage.queries.inspect.reasons import KeyReason, verdict
from storage.queries.inspect.resolution import resolution_at, resolution_now

STEPS_SHOWN: Final = 500
KEYS_SHOWN: Final = 200
EVENTS_SHOWN: Final = 500


async def page(visit: Visit) -> Response:
    """Show the resolution of the state before an event, or of the state of a room now.

    The form takes a room id, too: it leads to the merges of the room.
    """
    if (visit.text("event") or "").startswith("!"):
        merges = f"{visit.links('/room', id=visit.room('event'))}#merges"
        return RedirectResponse(merges, 303, data_headers())
    event_id = None if visit.text("event") is None else visit.event("event")
    found = (
        await visit.read(resolution_now, visit.room("room"))
        if event_id is None
        else await visit.read(resolution_at, event_id)
    )
    said, replay, content = verdict(found), found.replay, visit.content()
    keys = said.keys[:KEYS_SHOWN]
    return visit.render(
        "resolution.html",
        event_id=event_id,
        found=found,
        verdict=said,
        keys=keys,
        contents=await _contents(visit, keys) if content else {},
        shown_content=content,
        of_branches=set().union(*(() if replay is None else replay.conflicted.values())),
        steps=[] if replay is None else replay.steps[:STEPS_SHOWN],
        difference_ids=frozenset() if replay is None else replay.difference,
        full=[] if replay is None else sorted(replay.full)[:EVENTS_SHOWN],
        full_count=0 if replay is None else len(replay.full),
        difference=[] if replay is None else sorted(replay.difference)[:EVENTS_SHOWN],
        tips=await visit.read(lines_by_id, found.tips),
    )


async def _contents(visit: Visit, keys: Sequence[KeyReason]) -> dict[str, Any]:
    values = {value for one in keys for value in one.values.values() if value is not None}
    lines = await visit.read(lines_by_id, sorted(values))
    return await contents_of(visit, list(lines.values()))
