"""Search: by event id, room id, alias or user id; a whole one leads to its page.

Reads: `storage.queries.inspect.search`.
"""

from starlette.responses import RedirectResponse, Response

from storage.inspector.headers import data_headers
from storage.inspector.visit import Visit
from storage.queries.inspect.search import events_called, rooms_by_alias, rooms_like, users_like


async def page(visit: Visit) -> Response:
    """Show what an id or its beginning stands for. Text without a sigil is of any kind."""
    wanted = visit.text("q") or ""
    events = rooms = users = []
    sigil = wanted[:1]
    if wanted and (sigil == "$" or sigil not in "!@#"):
        events = await visit.read(events_called, _with("$", wanted))
    if wanted and (sigil == "!" or sigil not in "$@#"):
        rooms = await visit.read(rooms_like, _with("!", wanted))
    if wanted and (sigil == "@" or sigil not in "$!#"):
        users = await visit.read(users_like, _with("@", wanted))
    if sigil == "#":
        rooms = [str(room) for room in await visit.read(rooms_by_alias, wanted)]
    found = {"/event": events, "/room": rooms, "/user": users}
    for path, ids in found.items():
        if wanted in ids or (sigil == "#" and len(ids) == 1):
            chosen = wanted if wanted in ids else ids[0]
            return RedirectResponse(visit.links(path, id=chosen), 303, data_headers())
    return visit.render("search.html", wanted=wanted, found=found)


def _with(sigil: str, text: str) -> str:
    return text if text.startswith(sigil) else f"{sigil}{text}"
