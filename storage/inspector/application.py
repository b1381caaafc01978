"""The ASGI application: its routes, and what all requests share.

    app = storage.inspector.application(store, access=my_access)
    Mount("/rooms", app)          # in a homeserver on Starlette; any ASGI server can mount it
    …
    await app.close()             # before the store is closed

Without ``read_write`` there is no route that accepts another method than GET and HEAD.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from storage.errors import (
    DatabaseError,
    InputError,
    PermissionRefused,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    UnknownEvent,
    UnknownRoom,
    UnknownUser,
)
from storage.inspector import rendering
from storage.inspector.access import Access, TokenAccess, data_headers, static_headers
from storage.inspector.actions import ACTION_ROUTES, POST_ROUTES
from storage.inspector.actions.catalogue import Tasks
from storage.inspector.pages import PAGES
from storage.inspector.rendering import static_file
from storage.inspector.visit import LIVE, ContentRefusedError, Page, Visit
from storage.store.facade import Store

# --------------------------------------------------------------------------------------------------
# An error as a page: its cause, the next step, and the form with what was entered.
#
# While the database does not answer, the page is loaded again by itself. So it recovers without a
# click, also without JavaScript.

logger: logging.Logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 2
"""After so many seconds a browser loads the page again while the database is down."""


class Failure(NamedTuple):
    """The text of the page of an error. ``again``: the page is loaded again by itself."""

    status: int
    title: str
    next_step: str
    again: bool = False


NOT_STORED: Final = Failure(
    404, "It is not stored here", "Check the id. A purge, or a room that was left, removes events."
)
INPUT: Final = Failure(400, "This cannot be shown", "Correct the entry, and try again.")
DOWN: Final = Failure(
    503,
    "The database does not answer",
    "This page tries again by itself. Nothing is lost.",
    again=True,
)
REFUSED_BY_ROLE: Final = Failure(
    403, "The role of the database lacks a privilege", "See the how-to on roles."
)
CORRUPT: Final = Failure(500, "The store contradicts itself", "Run `room-storage verify`.")
NO_CONTENT: Final = Failure(
    403, "You may not see the content of events", "The homeserver decides who may."
)
DEFECT: Final = Failure(500, "This page has failed", "The log of the process has the reason.")


def failure_of(error: Exception) -> Failure:
    """Return what to say of an error."""
    if isinstance(error, UnknownEvent | UnknownRoom | UnknownUser):
        return NOT_STORED
    if isinstance(error, InputError):
        return INPUT
    if isinstance(error, PermissionRefused):
        return REFUSED_BY_ROLE
    if isinstance(error, DatabaseError | StorageClosed):
        return DOWN
    if isinstance(error, StorageCorrupt):
        return CORRUPT
    return NO_CONTENT if isinstance(error, ContentRefusedError) else DEFECT


def failed(visit: Visit, error: Exception) -> Response:
    failure = failure_of(error)
    if failure is DEFECT:
        logger.error("%s failed", visit.request.url.path, exc_info=error)
    reason = str(error) if isinstance(error, StorageError) else ""
    answer = visit.render("failure.html", status=failure.status, failure=failure, reason=reason)
    if failure.again:
        answer.headers["Refresh"] = str(AGAIN_SECONDS)
    return answer


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
                rendering.log_refusal(request.url.path, client)
                return Response(REFUSED, 403, data_headers(), "text/plain; charset=utf-8")
            visit = Visit(self, request, viewer)
            rendering.log_page(viewer, request.url.path, visit.parameters)
            try:
                return await page(visit)
            except Exception as error:  # noqa: BLE001  # every error is a page
                return failed(visit, error)

        return answer


async def static(request: Request) -> Response:
    """Return a script or a style sheet."""
    file = static_file(request.path_params["name"])
    if file is None:
        return Response("not found\n", 404, data_headers(), "text/plain; charset=utf-8")
    body, kind = file
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


# --------------------------------------------------------------------------------------------------
# Serve one application on a port of this machine, until told to stop.

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
CLOSE_SECONDS: Final = 2


class SignallessServer(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound(host: str, port: int) -> socket.socket:
    """Listen on an address. `InputError` if that is impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return made


def hosts_of(host: str, port: int) -> frozenset[str]:
    """Return the values of the header Host that lead to a loopback address."""
    return frozenset(f"{name}:{port}" for name in {*LOOPBACK, host})


@asynccontextmanager
async def serving(inspector: Inspector, listening: socket.socket) -> AsyncIterator[None]:
    """Serve an application during the block."""
    config = uvicorn.Config(
        inspector,
        access_log=False,
        log_config=None,
        lifespan="off",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        timeout_keep_alive=30,
    )
    server = SignallessServer(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="inspector")
    try:
        yield
    finally:
        await inspector.close()
        server.should_exit = True
        await task
