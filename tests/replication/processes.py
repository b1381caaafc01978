"""Processes that write facts and follow each other's, without a whole store.

Their stream is "caches", as its table is the simplest.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import pytest

from storage.database.connection import Database
from storage.replication import transport
from storage.replication.commands import Command
from storage.replication.transport import Link, ReplicationLimits
from storage.streams import startup
from storage.streams.feed import Advance, StreamRow
from storage.streams.registry import Streams

SERVER_NAME = "example.com"
QUICK: Final = ReplicationLimits(retry_ms_first=1, retry_ms_max=20, close_ms=2_000, page_rows_max=7)
"""Comes back quickly, and reads small pages. All tests of this folder have these limits."""

WRITE = """
WITH
    ids AS (SELECT nextval('caches_stream') AS stream_id FROM generate_series(1, $1::int)),
    facts AS (
        INSERT INTO cache_invalidations (stream_id, invalidation_ts, writer_nid, cache_name, keys)
        SELECT stream_id, $2::bigint, $3::smallint, 'get_user_by_id', ARRAY[stream_id::text]
            FROM ids
        RETURNING stream_id
    ),
    moved AS (
        UPDATE stream_positions SET stream_id = (SELECT max(stream_id) FROM ids)
        WHERE stream_name = 'caches' AND instance_name = $4::text
    )
SELECT stream_id FROM facts ORDER BY stream_id
"""
WRITTEN = """
SELECT i.stream_id FROM cache_invalidations i JOIN writers w USING (writer_nid)
    WHERE w.instance_name = $1::text ORDER BY i.stream_id
"""


def limit(patch: pytest.MonkeyPatch, **changes: int) -> None:
    """Change the limits of all that a test makes from now on."""
    patch.setattr(transport, "LIMITS", replace(transport.LIMITS, **changes))


class Seen:
    """Facts that the feed of one process has published: all of them, once, in order."""

    def __init__(self, streams: Streams) -> None:
        self.advances: list[Advance] = []
        self.facts: dict[tuple[str, str], list[StreamRow]] = {}
        self._streams = streams
        self._moved = asyncio.Event()
        streams.feed.subscribe(self._told)

    def _told(self, advance: Advance) -> None:
        self.advances.append(advance)
        self.facts.setdefault((advance.stream_name, advance.instance_name), []).extend(advance.rows)
        self._moved.set()

    def ids(self, writer: str, stream: str = "caches") -> list[int]:
        return [fact.stream_id for fact in self.facts.get((stream, writer), [])]

    async def reached(self, writer: str, position: int, stream: str = "caches") -> None:
        """Wait until this process knows the writer to be there."""
        async with asyncio.timeout(60):
            while self._streams[stream].positions().get(writer, 0) < position:
                self._moved.clear()
                await self._moved.wait()


class Process:
    """A stand-in for a store, as far as replication knows one."""

    def __init__(
        self, database: Database, streams: Streams, writer_nid: int, server_name: str
    ) -> None:
        self.database = database
        self.streams = streams
        self.server_name = server_name
        self.instance_name = streams.instance_name
        self.seen = Seen(streams)
        self._writer_nid = writer_nid
        self._turn = asyncio.Lock()
        self.up: list[str] = []

    async def server_up(self, server_name: str) -> None:
        self.up.append(server_name)

    @classmethod
    async def start(
        cls, database: Database, instance_name: str, server_name: str = SERVER_NAME
    ) -> "Process":
        async with database.transaction() as conn:
            writer_nid = await startup.enter(conn, instance_name)
            return cls(
                database,
                Streams(database, instance_name, await startup.positions(conn)),
                writer_nid,
                server_name,
            )

    async def write(self, count: int = 1, *, abandon: bool = False) -> list[int]:
        """Commit facts and tell of them; their ids.

        ``abandon``: give them up, which moves the position over nothing.
        """
        async with self._turn:
            async with self.database.connection() as conn:
                if abandon:
                    ids = await conn.fetchvals(
                        "SELECT nextval('caches_stream') FROM generate_series(1, $1::int)", count
                    )
                else:
                    ids = await conn.fetchvals(
                        WRITE,
                        count,
                        time.time_ns() // 1_000_000,
                        self._writer_nid,
                        self.instance_name,
                    )
            facts = [] if abandon else [self.fact(stream_id) for stream_id in ids]
            self.streams.advance("caches", self.instance_name, ids[-1], facts)
            return ids

    def fact(self, stream_id: int) -> StreamRow:
        return StreamRow(
            stream_id, self.instance_name, ["get_user_by_id", [str(stream_id)], 1550574873251]
        )

    async def written(self) -> list[int]:
        """The ids of all its facts, from the table."""
        async with self.database.connection() as conn:
            return await conn.fetchvals(WRITTEN, self.instance_name)

    def tell(self, stream_id: int, rows: Sequence[list[Any]], stream: str = "caches") -> None:
        """Advance by rows that are in no table."""
        self.streams.advance(
            stream,
            self.instance_name,
            stream_id,
            [StreamRow(stream_id, self.instance_name, row) for row in rows],
        )

    @property
    def position(self) -> int:
        return self.streams["caches"].positions()[self.instance_name]


class Lines:
    """A person with netcat."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, *lines: str) -> None:
        self.writer.write("".join(line + "\n" for line in lines).encode())

    async def hear(self, start: str = "") -> str:
        """The next line that starts so; others before it are let pass. Empty at the end."""
        async with asyncio.timeout(60):
            while line := (await self.reader.readline()).decode():
                if line.startswith(start):
                    return line.removesuffix("\n")
            return ""

    async def all(self) -> list[str]:
        """All that comes until the other side hangs up."""
        async with asyncio.timeout(60):
            return (await self.reader.read()).decode().splitlines()


@asynccontextmanager
async def netcat(port: int, **options: Any) -> AsyncIterator[Lines]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield Lines(reader, writer)
    finally:
        writer.transport.abort()


class FailsOnce:
    """A subscriber that fails on the second link; ``links`` counts them."""

    def __init__(self) -> None:
        self.links = 0

    def connected(self, _: Link) -> None:
        self.links += 1
        if self.links == 2:
            raise ZeroDivisionError

    def received(self, _: Command, __: Link) -> None:
        pass

    def disconnected(self, _: Link) -> None:
        pass
