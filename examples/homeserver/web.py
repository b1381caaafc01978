"""Requests and responses in JSON, and the Matrix error of each exception."""

import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import orjson
from aiohttp import web
from multidict import MultiMapping

from storage import StorageError, responses
from storage.federation import RemoteError

if TYPE_CHECKING:
    from .server import Homeserver

Json = dict[str, Any]
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
MALFORMED: Final = (AttributeError, LookupError, TypeError, ValueError)

CORS: Final = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, PUT, OPTIONS",
    "Access-Control-Allow-Headers": "X-Requested-With, Content-Type, Authorization",
}


class MatrixError(Exception):
    """An error for the client."""

    def __init__(self, status: int, errcode: str, error: str, **more: Any) -> None:
        super().__init__(error)
        self.status, self.body = status, {"errcode": errcode, "error": error, **more}


class Call(NamedTuple):
    """A request. ``sender`` is the user that is logged in, or the server that signed it."""

    api: str
    query: MultiMapping[str]
    body: Any
    sender: Any
    device: str


def on(method: str, path: str) -> Callable[[Method], Method]:
    """Let a method of an `Api` answer the requests to a path. Its variables are arguments."""

    def mark(answer: Method) -> Method:
        vars(answer).setdefault("paths", []).append((method, path))
        return answer

    return mark


class Api:
    """Requests below a prefix. A subclass identifies their senders."""

    prefix = ""

    def __init__(self, home: "Homeserver") -> None:
        self.home, self.store = home, home.store

    async def identify(self, request: web.Request, body: Json) -> tuple[str, str]:  # noqa: ARG002
        """Return the sender of a request, and its device if it is a user."""
        return "", ""

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for aiohttp."""
        return [
            web.route(method, self.prefix + path, partial(self._respond, getattr(self, name)))
            for name, answer in vars(type(self)).items()
            for method, path in getattr(answer, "paths", ())
        ]

    async def _respond(self, answer: Method, request: web.Request) -> web.Response:
        status, path = 200, dict(request.match_info)
        try:
            body, api = json.loads(await request.read() or b"{}"), path.pop("api", "")
            call = Call(api, request.query, body, *await self.identify(request, body))
            found = await answer(call, **path)
        except MatrixError as error:
            status, found = error.status, error.body
        except (StorageError, RemoteError) as error:
            status, found = responses.error(error, for_member="/rooms/" in request.path)
        except MALFORMED as error:
            status, found = 400, {"errcode": "M_BAD_JSON", "error": repr(error)}
        return web.json_response(
            {} if found is None else found, status=status, headers=CORS, dumps=_dumps
        )


def _dumps(response: Any) -> str:
    def default(it: Any) -> Any:
        return getattr(it, "json", None) or list(it)

    try:
        return orjson.dumps(response, default, orjson.OPT_PASSTHROUGH_DATACLASS).decode()
    except TypeError:  # in old room versions a number may have more than 64 bits
        return json.dumps(response, default=default)


def now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000
