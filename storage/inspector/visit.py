"""One request: its viewer, its parameters, its reads, and its answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, LiteralString, TypeVar

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from storage import arguments as args
from storage.errors import InputError, StorageClosed, StorageError
from storage.ids import EventId, RoomId
from storage.inspector import rendering
from storage.inspector.access import Viewer, data_headers, new_nonce, page_headers
from storage.inspector.rendering import Links, environment
from storage.store.facade import Store
from storage.streams import SyncToken, VectorPosition

if TYPE_CHECKING:
    from storage.inspector.application import Inspector

T = TypeVar("T")

EVENTS: Final = "events"  # the stream

PARAMETER_MAX: Final = 4_096  # characters; ids of Matrix have 255 bytes
INTEGER_MAX: Final = 2**63 - 1


class ContentRefusedError(Exception):
    """The viewer asks for content that they may not see."""


class Visit:
    """A request of a viewer."""

    def __init__(self, inspector: "Inspector", request: Request, viewer: Viewer) -> None:
        self.inspector = inspector
        self.request = request
        self.viewer = viewer
        self.links: Links = Links(request.scope.get("root_path", ""))
        self.nonce: str = new_nonce()
        self.since: str = self.print_position(self.position)
        """The position before the reads of this page: news after it is not on the page."""

    @property
    def store(self) -> Store:
        return self.inspector.store

    @property
    def position(self) -> VectorPosition:
        """Return the position that this process has in the stream of events."""
        return self.store.notifier.position(EVENTS)

    def print_position(self, position: VectorPosition) -> str:
        """Return a position of the stream of events as a parameter of live pages."""
        return SyncToken.of({EVENTS: position}).print(self.store.deployment_id)

    def read_position(self, text: str) -> VectorPosition:
        """Return the position of such a parameter. `InvalidToken`."""
        position = SyncToken.parse(text, self.store.deployment_id).position(EVENTS)
        return self.position if position is None else position

    # ---------------------------------------------------------------------------------------------
    # parameters

    @property
    def parameters(self) -> Mapping[str, str]:
        """Return the parameters of the URL; the first one of each name."""
        query = self.request.query_params
        return {name: query.getlist(name)[0] for name in query}

    def text(self, name: str) -> str | None:
        """Return a parameter without surrounding spaces, None if it is absent or empty.

        `InputError` for one that is too long, or that cannot be stored as text.
        """
        text = self.parameters.get(name, "").strip()
        if len(text) > PARAMETER_MAX:
            raise InputError(f"{name} has {len(text)} characters, more than {PARAMETER_MAX}")
        return args.text(text) if text else None

    def required(self, name: str) -> str:
        """Return a parameter. `InputError` if it is absent."""
        text = self.text(name)
        if text is None:
            raise InputError(f"the address lacks {name}")
        return text

    def event(self, name: str = "id") -> EventId:
        """Return an event id. `InvalidIdentifier`."""
        return args.event(self.required(name))

    def room(self, name: str = "id") -> RoomId:
        """Return a room id. `InvalidIdentifier`."""
        return args.room(self.required(name))

    def whole(self, name: str) -> int | None:
        """Return a whole number of 64 bits, not negative; None if it is absent. `InputError`."""
        text = self.text(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal()):
            raise InputError(f"{name} is {text!r}: a whole number is wanted")
        return min(int(text[:20]), INTEGER_MAX)

    def content(self) -> bool:
        """Return whether the content of events is to be shown, and log it.

        Raise `ContentRefusedError` if the viewer may not.
        """
        if self.parameters.get("content") != "1":
            return False
        if not self.viewer.content:
            raise ContentRefusedError
        rendering.log_content(self.viewer, self.request.url.path, self.parameters)
        return True

    # ---------------------------------------------------------------------------------------------
    # reads and answers

    async def read(self, query: Callable[..., Awaitable[T]], *arguments: Any, **how: Any) -> T:
        """Run a query on one snapshot, on a standby where the store has one."""
        return await self.store.reads.run(
            lambda conn: query(conn, *arguments, **how), snapshot=True
        )

    def render(self, template: str, *, status: int = 200, **values: Any) -> Response:
        text = environment().get_template(template).render(self._shared() | values)
        return HTMLResponse(text, status, headers=page_headers(self.nonce))

    def fragment(self, template: str, **values: Any) -> Response:
        """Return a part of a page, which a script adds to it."""
        return self.render(template, **values)

    def _shared(self) -> dict[str, Any]:
        inspector, root = self.inspector, self.request.scope.get("root_path", "")
        here = self.request.url.path.removeprefix(root)
        hidden = {name: value for name, value in self.parameters.items() if name != "content"}
        return {
            "content_off": self.links.to(here, hidden),
            "content_on": self.links.to(here, hidden | {"content": "1"}),
            "here": here,
            "link": self.links,
            "nonce": self.nonce,
            "parameters": self.parameters,
            "read_write": inspector.read_write and self.viewer.write,
            "server_name": self.store.server_name,
            "shown_content": False,
            "since": self.since,
            "viewer": self.viewer,
        }


Page = Callable[[Visit], Awaitable[Response]]
"""A page: from a request to its answer."""


# --------------------------------------------------------------------------------------------------
# New events, by server-sent events: rooms with news, and whether the database answers.
#
#     id: s…    event: news        data: {"rooms": ["!room:example.org"]}
#               event: database    data: {"up": false}
#
# The notifier of the store wakes the stream: nothing is polled for news. A stream begins at the
# position of its page (``since``), or where a broken one ended (``Last-Event-ID``). So it also has
# what arrived before it could begin. Every few seconds the stream asks whether the database
# answers, so that a page can say that it is dead, and load again when it is back. A stream has no
# content of events.

ROOMS_MAX: Final = 100
STREAMS_MAX: Final = 64
BEAT_MS: Final = 2_000
"""Longest time between two looks at the database."""

SQL_ALIVE: Final[LiteralString] = "VALUES (1)"


async def live(visit: Visit) -> Response:
    """Return a stream of news of the rooms in the parameters ``room``."""
    inspector = visit.inspector
    rooms = [args.room(room_id) for room_id in visit.request.query_params.getlist("room")]
    if len(rooms) > ROOMS_MAX:
        raise InputError(f"a live page has at most {ROOMS_MAX} rooms")
    if inspector.streams >= STREAMS_MAX:
        return Response("too many live pages\n", 503, data_headers(), "text/plain")
    token = visit.request.headers.get("Last-Event-ID") or visit.text("since")
    since = visit.position if token is None else visit.read_position(token)
    body = _stream(visit, rooms, since)
    return StreamingResponse(body, 200, data_headers(), "text/event-stream")


LIVE: Final[Mapping[str, Page]] = {"/live": live}


async def _stream(
    visit: Visit, rooms: Sequence[RoomId], since: VectorPosition
) -> AsyncIterator[bytes]:
    inspector = visit.inspector
    inspector.streams += 1
    try:
        yield b"retry: 2000\n\n"
        up = True
        while not inspector.closing.is_set():
            has_changed = await _wait(visit, rooms, since)
            if has_changed:
                token, since = since, visit.position
                changed = [room for room in rooms if _has_changed(visit.store, room, token)]
                message = _event("news", {"rooms": changed or list(rooms)})
                yield f"id: {visit.print_position(since)}\n".encode() + message
            was_up, up = up, await _is_up(visit.store)
            yield _event("database", {"up": up}) if up != was_up else b": beat\n\n"
    except StorageClosed:
        return
    finally:
        inspector.streams -= 1


async def _wait(visit: Visit, rooms: Sequence[RoomId], since: VectorPosition) -> bool:
    """Wait for news of a room, for at most a beat, or until the inspector closes."""
    after = SyncToken.of({EVENTS: since})
    change = asyncio.ensure_future(
        visit.store.notifier.wait(rooms, after=after, timeout_ms=BEAT_MS)
    )
    closing = asyncio.ensure_future(visit.inspector.closing.wait())
    try:
        await asyncio.wait({change, closing}, return_when=asyncio.FIRST_COMPLETED)
        return change.done() and change.result()
    finally:
        for task in (change, closing):
            task.cancel()
        await asyncio.gather(change, closing, return_exceptions=True)


def _has_changed(store: Store, room_id: RoomId, since: VectorPosition) -> bool:
    return store.notifier.may_have_changed([room_id], {EVENTS: since})


async def _is_up(store: Store) -> bool:
    """Return whether the database answers."""
    try:
        await store.reads.run(lambda conn: conn.fetchval(SQL_ALIVE))
    except StorageError:
        return False
    return True


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
