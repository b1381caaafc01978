"""Why a user or server may see an event, or may not: one sentence, and the facts behind it.

Reads: `Store.explain_visibility`.
"""

from starlette.responses import Response

from storage.inspector.pages.event import line_of
from storage.inspector.visit import Visit


async def page(visit: Visit) -> Response:
    """Show the sentence of an event and a reader; without a reader, a form."""
    event_id, reader = visit.text("event"), visit.text("reader")
    if event_id is None or reader is None:
        return visit.render(
            "why.html", event_id=event_id, reader=reader, explanation=None, line=None
        )
    explanation = await visit.store.explain_visibility(event_id, reader)
    line = await line_of(visit, explanation.event_id)
    return visit.render(
        "why.html", event_id=event_id, reader=reader, explanation=explanation, line=line
    )
