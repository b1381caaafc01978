"""What tests of the client share: a connected client, a server whose lines a test writes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from storage.replication import Client
from tests.replication.processes import Lines, Process


@asynccontextmanager
async def connected(reader: Process, port: int) -> AsyncIterator[Client]:
    async with Client(reader, "127.0.0.1", port) as client:
        await client.connected()
        yield client


async def check_complete(reader: Process, *writers: Process) -> None:
    """The reader has seen each fact that is in the table, once, in order."""
    for writer in writers:
        await reader.seen.reached(writer.instance_name, writer.position)
        assert reader.seen.ids(writer.instance_name) == await writer.written()


class FakeServer:
    """Listens, and lets a test say every line; each connection is one of `sessions`."""

    def __init__(self) -> None:
        self.sessions: asyncio.Queue[Lines] = asyncio.Queue()
        self._opened: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.hang_up()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._opened.append(writer)
        self.sessions.put_nowait(Lines(reader, writer))

    @asynccontextmanager
    async def client(self, reader: Process) -> AsyncIterator[Client]:
        async with Client(reader, "127.0.0.1", self.port) as client:
            yield client
            self.hang_up()

    def hang_up(self) -> None:
        for writer in self._opened:
            writer.transport.abort()

    async def session(self) -> Lines:
        async with asyncio.timeout(60):
            return await self.sessions.get()
