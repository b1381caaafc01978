"""A proxy in front of Postgres that loses connections at chosen moments, with the data on the way.

    async with AnswerEater(dsn) as eater:
        async with storage.open(eater.dsn, observer=eater) as store:
            eater.eat(SQL)       # lose the next response to this statement; the server runs it
            eater.delay(SQL)     # cut its next connection before it arrives; `deliver` sends it
            eater.cut()          # all connections end; the server may not notice
            eater.away = True    # new connections are refused

As the store's observer it knows when the statement is sent. The statement must have been prepared
before: then the next message is its execution, whose response ends with ReadyForQuery.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, quote, urlsplit

READY_FOR_QUERY = b"Z\x00\x00\x00\x05I"


class AnswerEater:
    """Listens on a Unix socket of its own and passes everything on, until it is told to eat."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        query = parse_qs(parts.query)
        self._target = f"{query['host'][0]}/.s.PGSQL.{query.get('port', ['5432'])[0]}"
        self._folder = Path(tempfile.mkdtemp(prefix="eater-"))
        self.dsn = (
            f"postgresql://{parts.username}@{parts.path}"
            f"?host={quote(str(self._folder), safe='')}&port=5432&sslmode=disable"
        )
        self.away = False
        self.eaten = asyncio.Event()
        self.delayed = asyncio.Event()
        self._wanted: Collection[str] = ()
        self._unhurried: Collection[str] = ()
        self._eating = self._delaying = False
        self._arrive, self._arrived = asyncio.Event(), asyncio.Event()
        self._clients: set[asyncio.StreamWriter] = set()
        self._servers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._folder / ".s.PGSQL.5432")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for server in self._servers.values():
            server.transport.abort()
        if self._servers:
            await asyncio.wait(self._servers)
        shutil.rmtree(self._folder)

    def before(self, statement: str) -> None:
        """See `storage.database.connection.Observer`."""
        if statement in self._wanted:
            self._wanted, self._eating = (), True
        if statement in self._unhurried:
            self._unhurried, self._delaying = (), True

    def after(self, statement: str, seconds: float) -> None:
        """See `storage.database.connection.Observer`."""

    def eat(self, *statements: str) -> None:
        """Lose the answer to the next of these, and the connection with it."""
        self._wanted = statements
        self.eaten.clear()

    def delay(self, *statements: str) -> None:
        """Keep the next of these on its way, and end its connection on the client's side."""
        self._unhurried = statements

    async def deliver(self) -> None:
        """What was kept arrives; returns when the server is done with it."""
        self._arrive.set()
        await self._arrived.wait()

    def cut(self) -> None:
        """End all connections on the client's side; on the server's only what it notices itself."""
        for client in self._clients:
            client.transport.abort()

    async def _serve(
        self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter
    ) -> None:
        if self.away:
            client.transport.abort()
            return
        self._clients.add(client)
        server_reader, server = await asyncio.open_unix_connection(self._target)
        back = asyncio.create_task(self._pass_back(server_reader, client))
        self._servers[back] = server
        try:
            while data := await client_reader.read(65536):
                if self._delaying:
                    await self._keep(client)
                server.write(data)
                await server.drain()
        except ConnectionError:
            pass  # one side has gone; the other follows below
        finally:
            self._clients.discard(client)
            await asyncio.wait([back])
            del self._servers[back]
            client.transport.abort()
            server.transport.abort()

    async def _keep(self, client: asyncio.StreamWriter) -> None:
        self._delaying = False
        client.transport.abort()
        self.delayed.set()
        await self._arrive.wait()

    async def _pass_back(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        """Answers go back, but for the one that is to be lost; ends when the server does."""
        lost = b""
        try:
            while data := await reader.read(65536):
                if self._arrive.is_set() and data.endswith(READY_FOR_QUERY):
                    self._arrived.set()
                if not self._eating:
                    client.write(data)
                    continue
                lost += data
                if lost.endswith(READY_FOR_QUERY):
                    self._eating = False
                    self.eaten.set()
                    break
        except ConnectionError:
            pass
        client.transport.abort()
