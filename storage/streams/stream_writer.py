"""Writes to a stream with a small store: one statement takes ids, writes facts, sets the position.

Within a process the writes of one stream follow one another, so a position never passes an id that
is still in flight. A write runs to its end even if its caller is cancelled, so committed facts are
always published. After a lost response, `storage.streams.in_flight` determines the outcome of the
write.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import DatabaseConflict
from storage.streams.feed import Fact
from storage.streams.in_flight import LOST, Author, InFlight
from storage.streams.position_poller import learn_writers
from storage.streams.reads import Reads
from storage.streams.registry import Streams

ATTEMPTS = 5


class WrittenFacts(NamedTuple):
    """The result of a write: its facts, and the number of writers of the stream."""

    facts: list[Fact]
    writers: int


class WrittenFactRow(NamedTuple):
    """The result of a statement that writes one fact."""

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
        self.instance_name: str = streams.instance_name
        self._streams = streams
        self._in_flight = InFlight(database, streams, (name,), writer_nid)
        self._one_at_a_time = asyncio.Lock()

    @property
    def reads(self) -> Reads:
        return self._streams.reads

    @property
    def author(self) -> Author:
        """Return the author for the statement that is being sent."""
        return self._in_flight.author

    async def write(self, write: Write) -> int:
        """Run a statement that commits on its own; return the largest id of its facts.

        It is done once, even if connections are lost.

        Raise `DatabaseUnavailable` if nothing was written. Raise `CommitUnknown` if the outcome
        cannot be determined; a second call may write the facts twice.
        """
        return await asyncio.shield(asyncio.create_task(self._write(write)))

    async def _write(self, write: Write) -> int:
        async with self._one_at_a_time:
            await self._in_flight.ready()
            facts = await self._attempt(write)
            self._streams.advance(self.name, self.instance_name, facts[-1].stream_id, facts)
            return facts[-1].stream_id

    async def _attempt(self, write: Write) -> Sequence[Fact]:
        """Repeat the write until it is done.

        Repeat it after conflicts with others, and once more after a lost connection without result.
        """
        lost = False
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._once(write)
            except DatabaseConflict:
                continue
            except LOST:
                if facts := (await self._in_flight.settle()).get(self.name):
                    return facts
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
