"""Writing to a stream that has a small store of its own: one statement takes the ids, writes the facts and moves the position.

Within a process the writes of one stream follow one another, so a position never passes an id that is still in flight. A write
goes on to its end when its caller is cancelled, so that what was committed is always told; where the answer of the database is lost,
it is found out what became of the write (`storage.streams.in_flight`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import DatabaseConflict
from storage.streams.feed import Fact
from storage.streams.in_flight import LOST, Author, InFlight
from storage.streams.position_poller import learn_writers
from storage.streams.registry import Streams

ATTEMPTS = 5


class WrittenFacts(NamedTuple):
    """What a statement wrote: its facts, and how many writers the stream has."""

    facts: list[Fact]
    writers: int


class WrittenFactRow(NamedTuple):
    """The answer of a statement that writes one fact."""

    stream_id: int
    writers: int


Write = Callable[[Connection], Awaitable[WrittenFacts]]


class StreamWriter:
    """Writes facts to one stream, for one process.

    ``writer_nid`` is this process's number in `writers`.
    """

    def __init__(self, name: str, database: Database, streams: Streams, writer_nid: int) -> None:
        self.name = name
        self.database = database
        self.instance_name = streams.instance_name
        self._streams = streams
        self._in_flight = InFlight(database, streams, (name,), writer_nid)
        self._one_at_a_time = asyncio.Lock()

    @property
    def author(self) -> Author:
        """For the statement that is being sent."""
        return self._in_flight.author

    async def write(self, write: Write) -> int:
        """Run a statement that commits on its own; the largest id of the facts it gives.

        It is done once, whatever becomes of connections.

        `DatabaseUnavailable`: nothing was written. `CommitUnknown`: there is nobody to ask whether
        it was; done again it may be there twice.
        """
        return await asyncio.shield(asyncio.create_task(self._write(write)))

    async def _write(self, write: Write) -> int:
        async with self._one_at_a_time:
            await self._in_flight.ready()
            facts = await self._attempt(write)
            self._streams.advance(self.name, self.instance_name, facts[-1].stream_id, facts)
            return facts[-1].stream_id

    async def _attempt(self, write: Write) -> Sequence[Fact]:
        """Until it is done: again where others were in the way, and once more where a connection was lost and it was not done."""
        lost = False
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._once(write)
            except DatabaseConflict:
                continue
            except LOST:
                if told := (await self._in_flight.settle()).get(self.name):
                    return told
                if lost:
                    raise
                lost = True
        return await self._once(write)

    async def _once(self, write: Write) -> list[Fact]:
        with self._in_flight.writing():
            async with self.database.connection() as conn:
                self._in_flight.sent(conn)
                written = await write(conn)
            await learn_writers(self.database, self._streams, self.name, written.writers)
            self._in_flight.answered()
        return sorted(written.facts, key=lambda fact: fact.stream_id)
