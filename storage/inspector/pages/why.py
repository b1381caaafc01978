"""Why a user or server may see an event, or may not: one sentence, and the facts behind it.

Reads: `Store.explain_visibility`; the event that set the visibility, from the state before.
"""

from typing import Final

from starlette.responses import Response

from storage.ids import EventId, StateKey
from storage.inspector.pages.event import line_of
from storage.inspector.visit import Visit
from storage.queries.inspect.lines import EventLine
from storage.queries.state_at import states_at

VISIBILITY: Final[StateKey] = ("m.room.history_visibility", "")


async def page(visit: Visit) -> Response:
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
