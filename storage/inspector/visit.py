"""One request: its viewer, its parameters, its reads, and its answer."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from storage import arguments as args
from storage.errors import InputError
from storage.ids import EventId, RoomId
from storage.inspector import looks
from storage.inspector.access import Viewer
from storage.inspector.headers import new_nonce, page_headers
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

    def read_position(self, given: str) -> VectorPosition:
        """Return the position of such a parameter. `InvalidToken`."""
        found = SyncToken.parse(given, self.store.deployment_id).position(EVENTS)
        return self.position if found is None else found

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
        given = self.parameters.get(name, "").strip()
        if len(given) > PARAMETER_MAX:
            raise InputError(f"{name} has {len(given)} characters, more than {PARAMETER_MAX}")
        return args.text(given) if given else None

    def wanted(self, name: str) -> str:
        """Return a parameter. `InputError` if it is absent."""
        given = self.text(name)
        if given is None:
            raise InputError(f"the address lacks {name}")
        return given

    def event(self, name: str = "id") -> EventId:
        """Return an event id. `InvalidIdentifier`."""
        return args.event(self.wanted(name))

    def room(self, name: str = "id") -> RoomId:
        """Return a room id. `InvalidIdentifier`."""
        return args.room(self.wanted(name))

    def whole(self, name: str) -> int | None:
        """Return a whole number of 64 bits, not negative; None if it is absent. `InputError`."""
        given = self.text(name)
        if given is None:
            return None
        if not (given.isascii() and given.isdecimal()):
            raise InputError(f"{name} is {given!r}: a whole number is wanted")
        return min(int(given[:20]), INTEGER_MAX)

    def content(self) -> bool:
        """Return whether the content of events is to be shown, and log it.

        Raise `ContentRefusedError` if the viewer may not.
        """
        if self.parameters.get("content") != "1":
            return False
        if not self.viewer.content:
            raise ContentRefusedError
        looks.log_content(self.viewer, self.request.url.path, self.parameters)
        return True

    # ---------------------------------------------------------------------------------------------
    # reads and answers

    async def read(self, query: Callable[..., Awaitable[T]], *given: Any, **how: Any) -> T:
        """Run a query on one snapshot, on a standby where the store has one."""
        return await self.store.reads.run(lambda conn: query(conn, *given, **how), snapshot=True)

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
