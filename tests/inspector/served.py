"""An inspector on a port of the test's own, and a client of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import Mount

from storage import Store
from storage.inspector import Access, Inspector, Viewer, application
from storage.inspector.application import SignallessServer, bound, serving

LOOKER = Viewer("tester", write=True)


def new_session() -> aiohttp.ClientSession:
    """A client that keeps cookies, also of an address without a name."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))


async def everybody(_: HTTPConnection) -> Viewer | None:
    return LOOKER


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    headers: Mapping[str, str]
    text: str


@dataclass(frozen=True)
class Served:
    """A running inspector."""

    url: str
    inspector: Inspector
    session: aiohttp.ClientSession

    def address(self, path: str, **parameters: Any) -> str:
        query = urlencode(parameters)
        return f"{self.url}{path}{'?' if query else ''}{query}"

    async def get(self, path: str, **parameters: Any) -> HttpAnswer:
        return await self.send("GET", self.address(path, **parameters))

    async def send(self, method: str, url: str, **how: Any) -> HttpAnswer:
        async with self.session.request(method, url, allow_redirects=False, **how) as answer:
            return HttpAnswer(answer.status, answer.headers, await answer.text(errors="replace"))


@asynccontextmanager
async def served(
    store: Store, *, access: Access = everybody, read_write: bool = False
) -> AsyncIterator[Served]:
    listening = bound("127.0.0.1", 0)
    inspector = application(store, access=access, read_write=read_write)
    async with serving(inspector, listening), new_session() as session:
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", inspector, session)
    listening.close()


@asynccontextmanager
async def mounted(store: Store, path: str, access: Access) -> AsyncIterator[Served]:
    """Serve an application of another framework's making, which has the inspector below a path."""
    listening = bound("127.0.0.1", 0)
    inspector = application(store, access=access)
    outside = Starlette(routes=[Mount(path, inspector)])
    server = SignallessServer(uvicorn.Config(outside, log_config=None, lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        async with new_session() as session:
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", inspector, session)
    finally:
        await inspector.close()
        server.should_exit = True
        await task
        listening.close()
