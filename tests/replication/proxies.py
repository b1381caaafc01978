"""A proxy for connections that break: at once, after so many bytes, or for as long as one likes.

async with Proxy(target_port) as proxy:
    … connect to proxy.port …
    proxy.cut()               # every connection breaks now
    proxy.cut_after = 100     # each new one breaks when the target has sent so many bytes, in the
                              middle of a line maybe
    proxy.open = False        # nobody gets through any more
    proxy.answers.clear()     # the target gets everything and its answers do not arrive, until
                              `proxy.answers.set()`
    proxy.target = another    # each new one leads there
    proxy.flows.clear()       # nothing arrives any more, until `proxy.flows.set()`; nobody is told
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit


class Proxy:
    """Listens on a port of its own on loopback; the target is a port there, or a Unix socket."""

    def __init__(self, target: int | Path) -> None:
        self.target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.open = True
        self.flows = asyncio.Event()
        self.flows.set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.cut_after: Callable[[], int] | None = None
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        self.flows.set()
        self.answers.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """Break all connections, without a word."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.connections += 1
        if not self.open:
            client.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        connect = (
            asyncio.open_connection("127.0.0.1", self.target)
            if isinstance(self.target, int)
            else asyncio.open_unix_connection(self.target)
        )
        try:
            target_reader, target = await connect
        except OSError:  # nobody is there: the client finds out as it would without a proxy
            client.transport.abort()
            return
        ends = {client, target}
        self._writers |= ends
        try:
            bytes_left = self.cut_after() if self.cut_after else None
            await asyncio.wait(
                [
                    asyncio.create_task(self._pass_on(reader, target, None, self.flows)),
                    asyncio.create_task(
                        self._pass_on(target_reader, client, bytes_left, self.answers)
                    ),
                ],
                return_when=asyncio.ALL_COMPLETED,
            )
        finally:
            self._writers -= ends
            for writer in ends:
                writer.transport.abort()

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        bytes_left: int | None,
        gate: asyncio.Event,
    ) -> None:
        try:
            while data := await reader.read(65536):
                if bytes_left is not None:
                    data, bytes_left = data[:bytes_left], bytes_left - len(data)
                await self.flows.wait()
                await gate.wait()
                writer.write(data)
                await writer.drain()
                if bytes_left is not None and bytes_left <= 0:
                    break
        except OSError:
            pass  # one side has gone; the other follows below
        if bytes_left is not None and bytes_left <= 0:
            writer.transport.abort()
        else:
            writer.close()


def unix_socket_of(dsn: str) -> Path:
    """Where the Postgres of a DSN listens."""
    query = parse_qs(urlsplit(dsn).query)
    return Path(query["host"][0]) / f".s.PGSQL.{query.get('port', ['5432'])[0]}"


def through(dsn: str, port: int) -> str:
    """The same database by a proxy at this port."""
    parts = urlsplit(dsn)
    return f"postgresql://{parts.username}@127.0.0.1:{port}{parts.path}?sslmode=disable"
