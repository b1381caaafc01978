"""A proxy in front of Postgres that loses the answer to a COMMIT, as a network does.

    async with CommitEater(dsn) as eater:
        async with await Database.open(eater.dsn) as database:
            eater.eat("answer")     # the next COMMIT is done, and nobody learns of it
            eater.eat("request")    # the next COMMIT never arrives

It understands nothing but the text of a simple query, which is how `Database.transaction` sends
COMMIT.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Literal, Self
from urllib.parse import parse_qs, quote, urlsplit

COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
READY_FOR_QUERY = b"Z\x00\x00\x00\x05I"


class CommitEater:
    """Listens on a Unix socket of its own, and passes all bytes on until a commit is to be lost."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        host = parse_qs(parts.query).get("host", [parts.hostname or "localhost"])[0]
        port = int(parse_qs(parts.query).get("port", [str(parts.port or 5432)])[0])
        self._target = (host, port)
        self._folder = Path(tempfile.mkdtemp(prefix="proxy-"))
        user = f"{parts.username}{f':{parts.password}' if parts.password else ''}"
        self.dsn = (
            f"postgresql://{user}@{parts.path}"
            f"?host={quote(str(self._folder), safe='')}&port=5432&sslmode=disable"
        )
        self.eaten = 0
        self._next: Literal["answer", "request"] | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._folder / ".s.PGSQL.5432")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        shutil.rmtree(self._folder)

    def eat(self, what: Literal["answer", "request"]) -> None:
        """Lose the next COMMIT's response, or the COMMIT itself; the connection ends either way."""
        self._next = what

    async def _serve(
        self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter
    ) -> None:
        host, port = self._target
        connect = (
            asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
            if host.startswith("/")
            else asyncio.open_connection(host, port)
        )
        server_reader, server = await connect
        back = asyncio.create_task(self._pass_on(server_reader, client))
        try:
            while data := await client_reader.read(65536):
                if COMMIT in data and self._next is not None:
                    await self._lose(data, server_reader, server, back)
                    return
                server.write(data)
                await server.drain()
        except ConnectionError:
            pass  # one side has gone; the other follows below
        finally:
            back.cancel()
            client.transport.abort()
            server.transport.abort()

    async def _lose(
        self,
        data: bytes,
        reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        back: "asyncio.Task[None]",
    ) -> None:
        """Stop passing answers on; if the answer is to be lost, let the server finish first."""
        what, self._next = self._next, None
        self.eaten += 1
        back.cancel()
        await asyncio.wait([back])
        if what == "answer":
            server.write(data)
            await reader.readuntil(READY_FOR_QUERY)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self.answered(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the client has gone
        writer.close()  # not when cancelled: then the canceller decides when the client hears of it

    async def answered(self, data: bytes) -> None:
        """Do something between an answer and its arrival."""
