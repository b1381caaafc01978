"""Requests and responses in JSON, and the Matrix error of each exception."""

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiohttp import web
from multidict import MultiMapping

import storage
from storage.federation import RemoteError

if TYPE_CHECKING:
    from .server import Homeserver

Json = dict[str, Any]
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
REFUSALS: Final[tuple[tuple[type[storage.StorageError], int, str], ...]] = (
    (storage.AuthDenied, 403, "M_FORBIDDEN"),
    (storage.UnknownRoom, 404, "M_NOT_FOUND"),
    (storage.UnknownEvent, 404, "M_NOT_FOUND"),
    (storage.ResyncNeeded, 400, "M_UNKNOWN_POS"),
    (storage.InputError, 400, "M_INVALID_PARAM"),
    (storage.StorageError, 503, "M_UNKNOWN"),
)
"""The response to each error. The first class that fits is used."""


class MatrixError(RemoteError):
    """An error for the client or the other server, or one that another server returned."""

    def __init__(self, status: int, errcode: str, error: str, **more: Any) -> None:
        super().__init__(f"{status} {errcode}: {error}")
        self.status, self.body = status, {"errcode": errcode, "error": error, **more}


@dataclass(frozen=True, slots=True)
class Call:
    """A request. ``sender`` is the user that is logged in, or the server that signed it."""

    path: Mapping[str, Any]
    query: MultiMapping[str]
    body: Any
    sender: Any
    device: str


def on(method: str, path: str) -> Callable[[Method], Method]:
    """Let a method of an `Api` answer the requests to a path."""

    def mark(answer: Method) -> Method:
        vars(answer).setdefault("paths", []).append((method, path))
        return answer

    return mark


class Api:
    """Requests below a prefix. A subclass knows how to identify their senders."""

    prefix = ""

    def __init__(self, home: "Homeserver") -> None:
        self.home, self.store = home, home.store

    async def identify(self, request: web.Request, body: Json) -> tuple[str, str]:  # noqa: ARG002
        """Return the sender of a request, and its device if it is a user."""
        return "", ""

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for aiohttp."""
        return [
            web.route(method, self.prefix + path, self._handler(getattr(self, name)))
            for name, answer in vars(type(self)).items()
            for method, path in getattr(answer, "paths", ())
        ]

    def _handler(
        self, answer: Callable[[Call], Awaitable[Any]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.Response:
            status: int = 200
            try:
                body = json.loads(await request.read() or b"{}")
                sender, device = await self.identify(request, body)
                response = await answer(
                    Call(request.match_info, request.query, body, sender, device)
                )
            except MatrixError as error:
                status, response = error.status, error.body
            except storage.StorageError as error:
                _, status, code = next(one for one in REFUSALS if isinstance(error, one[0]))
                response = {"errcode": code, "error": str(error)}
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                status, response = 400, {"errcode": "M_BAD_JSON", "error": repr(error)}
            return web.json_response(response, status=status)

        return handle


def now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000
