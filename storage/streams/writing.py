"""Writing to a stream that has a small store of its own: one statement takes the ids, writes the facts and moves the position.

Within a process the writes of one stream follow one another, so a position never passes an id that is still in flight. A write
goes on to its end when its caller is cancelled, so that what was committed is always told.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import DatabaseConflict
from storage.streams.feed import Fact
from storage.streams.following import learn_writers
from storage.streams.registry import Streams

ATTEMPTS = 5


class Facts(NamedTuple):
    """What a statement wrote: its facts, and how many writers the stream has."""

    facts: list[Fact]
    writers: int


class WrittenRow(NamedTuple):
    """The answer of a statement that writes one fact."""

    stream_id: int
    writers: int


Write = Callable[[Connection], Awaitable[Facts]]


class StreamWriter:
    """Writes facts to one stream, for one process. ``writer_nid`` is this process's number in `writers`."""

    def __init__(self, name: str, database: Database, streams: Streams, writer_nid: int) -> None:
        self.name = name
        self.database = database
        self.writer_nid = writer_nid
        self.instance_name = streams.instance_name
        self._streams = streams
        self._one_at_a_time = asyncio.Lock()

    async def write(self, write: Write) -> int:
        """Run a statement that commits on its own; the largest id of the facts it gives."""
        return await asyncio.shield(asyncio.create_task(self._write(write)))

    async def _write(self, write: Write) -> int:
        async with self._one_at_a_time:
            with self._streams.writing(self.name):
                written = await self._attempt(write)
                await learn_writers(self.database, self._streams, self.name, written.writers)
            facts = sorted(written.facts, key=lambda fact: fact.stream_id)
            self._streams.advance(self.name, self.instance_name, facts[-1].stream_id, facts)
            return facts[-1].stream_id

    async def _attempt(self, write: Write) -> Facts:
        for _ in range(ATTEMPTS - 1):
            try:
                async with self.database.connection() as conn:
                    return await write(conn)
            except DatabaseConflict:
                continue
        async with self.database.connection() as conn:
            return await write(conn)
