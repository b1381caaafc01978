"""A resolution replayed: which branch a merge preferred and why, and each check in its order.

Reads: `storage.queries.inspect.resolution`; the sentences are those of `reasons`.
"""

from typing import Final

from starlette.responses import RedirectResponse, Response

from storage.inspector.headers import data_headers
from storage.inspector.visit import Visit
from storage.queries.inspect.lines import lines_by_id
from storage.queries.inspect.reasons import verdict
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
    said, replay = verdict(found), found.replay
    return visit.render(
        "resolution.html",
        event_id=event_id,
        found=found,
        verdict=said,
        keys=said.keys[:KEYS_SHOWN],
        steps=[] if replay is None else replay.steps[:STEPS_SHOWN],
        full=[] if replay is None else sorted(replay.full)[:EVENTS_SHOWN],
        full_count=0 if replay is None else len(replay.full),
        difference=[] if replay is None else sorted(replay.difference)[:EVENTS_SHOWN],
        tips=await visit.read(lines_by_id, found.tips),
    )
