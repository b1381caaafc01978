"""Writing to a stream that has a small store of its own: one statement takes the ids, writes the facts and moves the position.

Within a process the writes of one stream follow one another, so a position never passes an id that is still in flight. A write
goes on to its end when its caller is cancelled, so that what was committed is always told; where the answer of the database is lost,
it is found out what became of the write (`storage.streams.in_flight`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import DatabaseConflict
from storage.streams.feed import Fact
from storage.streams.following import learn_writers
from storage.streams.in_flight import LOST, InFlight
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
        self._in_flight = InFlight(database, streams, (name,))
        self._one_at_a_time = asyncio.Lock()

    async def write(self, write: Write) -> int:
        """Run a statement that commits on its own; the largest id of the facts it gives.

        `DatabaseUnavailable`: nothing was written, or it could not be found out whether it was.
        """
        return await asyncio.shield(asyncio.create_task(self._write(write)))

    async def _write(self, write: Write) -> int:
        async with self._one_at_a_time:
            await self._in_flight.settle()
            try:
                facts = await self._attempt(write)
            except LOST:
                told = (await self._in_flight.settle()).get(self.name)
                if not told:
                    raise
                return told[-1].stream_id
            self._streams.advance(self.name, self.instance_name, facts[-1].stream_id, facts)
            return facts[-1].stream_id

    async def _attempt(self, write: Write) -> list[Fact]:
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._once(write)
            except DatabaseConflict:
                continue
        return await self._once(write)

    async def _once(self, write: Write) -> list[Fact]:
        with self._in_flight.writing():
            async with self.database.connection() as conn:
                self._in_flight.sent(conn)
                written = await write(conn)
            await learn_writers(self.database, self._streams, self.name, written.writers)
            self._in_flight.answered()
        return sorted(written.facts, key=lambda fact: fact.stream_id)
