"""The ASGI application: its routes, and what all requests share.

    app = storage.inspector.application(store, access=my_access)
    Mount("/rooms", app)          # in a homeserver on Starlette; any ASGI server can mount it
    …
    await app.close()             # before the store is closed

Without ``read_write`` there is no route that accepts another method than GET and HEAD.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from storage.errors import InputError
from storage.inspector import failures, looks
from storage.inspector.access import Access, TokenAccess
from storage.inspector.actions import ACTION_ROUTES, POST_ROUTES
from storage.inspector.actions.tasks import Tasks
from storage.inspector.headers import data_headers, static_headers
from storage.inspector.live import LIVE
from storage.inspector.pages import PAGES
from storage.inspector.rendering import static_file
from storage.inspector.visit import Page, Visit
from storage.store.facade import Store

REFUSED: Final = (
    "You have no access to the inspector.\n"
    "room-storage inspect prints an address with a token: open that one.\n"
)


class Inspector:
    """An ASGI application that shows the rooms of a store. `application` makes one."""

    def __init__(self, store: Store, access: Access, *, read_write: bool) -> None:
        self.store = store
        self.read_write = read_write
        self.secret: bytes = secrets.token_bytes(32)
        """Signs the forms of actions."""
        self.streams: int = 0
        """Live pages that are open."""
        self.closing: asyncio.Event = asyncio.Event()
        self.tasks: Tasks = Tasks()
        self._access = access
        self._starlette = Starlette(routes=self._routes())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._starlette(scope, receive, send)

    async def close(self) -> None:
        """End the streams of live pages, and the tasks of actions."""
        self.closing.set()
        await self.tasks.close()

    def _routes(self) -> list[Route]:
        actions = ACTION_ROUTES if self.read_write else {}
        posts = POST_ROUTES if self.read_write else {}
        return [
            Route("/static/{version}/{name}", static, methods=["GET"]),
            *(self._route(path, page, "GET") for path, page in {**PAGES, **LIVE}.items()),
            *(self._route(path, page, "GET") for path, page in actions.items()),
            *(self._route(path, page, "POST") for path, page in posts.items()),
        ]

    def _route(self, path: str, page: Page, method: str) -> Route:
        return Route(path, self._endpoint(page), methods=[method])

    def _endpoint(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if isinstance(self._access, TokenAccess):
                entered = self._access.entered(request)
                if entered is not None:
                    entered.headers.update(data_headers())
                    return entered
            viewer = await self._access(request)
            if viewer is None:
                client = request.client.host if request.client else "?"
                looks.log_refusal(request.url.path, client)
                return Response(REFUSED, 403, data_headers(), "text/plain; charset=utf-8")
            visit = Visit(self, request, viewer)
            looks.log_page(viewer, request.url.path, visit.parameters)
            try:
                return await page(visit)
            except Exception as error:  # noqa: BLE001  # every error is a page
                return failures.failed(visit, error)

        return answer


async def static(request: Request) -> Response:
    """Return a script or a style sheet."""
    found = static_file(request.path_params["name"])
    if found is None:
        return Response("not found\n", 404, data_headers(), "text/plain; charset=utf-8")
    body, kind = found
    return Response(body, 200, static_headers(), kind)


def application(store: Store, *, access: Access, read_write: bool = False) -> Inspector:
    """Return the inspector of an open store, to mount in a homeserver's ASGI application.

    ``access`` is called for each request, and returns the `Viewer`, or None to refuse. There is no
    default: a room is private. ``read_write`` adds the actions, for viewers with `Viewer.write`.
    Close it before the store. `InputError` for a store that was opened with ``read_only``.
    """
    if read_write and store.reads.read_only:
        raise InputError("read_write needs a store that was opened to write")
    return Inspector(store, access, read_write=read_write)
