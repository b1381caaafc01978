"""Readers of the stream "to_device": by linear position, by transport, and a naive lossy one."""

import asyncio

import asyncpg

from storage import Store
from storage.database.connection import Database
from storage.streams import startup
from storage.streams.registry import Streams
from tests.replication.processes import Seen

STREAM = "to_device"


class LinearReader:
    """Reads up to the linear position, whoever wrote."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.at = 0
        self.seen: list[int] = []

    async def read(self) -> None:
        stream = self.store.streams[STREAM]
        upto = stream.linear()
        facts = await stream.rows(self.at, upto, 1_000_000)
        self.seen += [fact.stream_id for fact in facts]
        self.at = upto


class NaiveReader:
    """What not to do: remembers the largest id it has seen, and asks for larger ones."""

    def __init__(self) -> None:
        self.last = 0
        self.seen: list[int] = []

    async def read(self, dsn: str, work: "asyncio.Future[list[None]]") -> None:
        """All the time, until the work is done, and once more."""
        connection = await asyncpg.connect(dsn)
        done = False
        while not done:
            done = work.done()
            rows = await connection.fetch(
                "SELECT stream_id FROM to_device WHERE stream_id > $1 ORDER BY stream_id", self.last
            )
            self.seen += [row[0] for row in rows]
            self.last = max([self.last, *self.seen[-1:]])
        await connection.close()


class Listener:
    """A reader that writes and polls nothing.

    It knows what replication brings, and reads the table where it has missed something.
    """

    server_name = "s1.test"

    def __init__(self, database: Database, streams: Streams) -> None:
        self.database = database
        self.streams = streams
        self.instance_name = streams.instance_name
        self.seen = Seen(streams)

    @classmethod
    async def start(cls, database: Database, name: str) -> "Listener":
        async with database.connection() as conn:
            return cls(database, Streams(database, name, await startup.positions(conn)))

    async def server_up(self, server_name: str) -> None:
        """It fetches nothing from other homeservers."""

    def told(self) -> list[tuple[int, str]]:
        """All facts, by their ids, each with its writer."""
        return sorted(
            (fact.stream_id, fact.instance_name)
            for (stream, _), facts in self.seen.facts.items()
            if stream == STREAM
            for fact in facts
        )
