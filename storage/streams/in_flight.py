"""The ids that a writer has in flight, until it is known what became of them, also where the answer of the database was lost.

A statement takes its ids, writes its facts and commits. If the connection is lost before its answer came, it may have been done, may
still be at work, or may never be done. Until that is known, no position may pass the ids it may hold: so the hold on the streams is
kept up, the backend that works at it is ended and waited for, and what has been committed after all is read from the tables and told.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, LiteralString

from storage.database.connection import Connection, Database
from storage.errors import CommitUnknown, DatabaseUnavailable, StorageError
from storage.streams.feed import Fact
from storage.streams.following import missed_facts
from storage.streams.registry import Streams

SQL_END_BACKEND: Final[LiteralString] = """
SELECT COALESCE(bool_and(pg_terminate_backend(a.pid, 5000)), true)
FROM pg_stat_activity a
WHERE a.pid = $1::int AND a.pid <> pg_backend_pid() AND a.application_name = left('room-storage ' || $2::text, 63)
"""

LOST: Final = (DatabaseUnavailable, CommitUnknown)
"""Errors that do not say whether a statement which had been sent was done."""

ATTEMPTS: Final = 3


class InFlight:
    """What one writer may have in flight in some streams; it makes one write at a time.

    with in_flight.writing():
        in_flight.sent(conn)        before the statement
        …
        in_flight.answered()        its answer is here, and other writers are known

    A block that ends in between, but for an error which says that nothing was done, leaves the ids held until `settle`.
    """

    def __init__(self, database: Database, streams: Streams, names: Sequence[str]) -> None:
        self._database = database
        self._streams = streams
        self._names = names
        self._hold = ExitStack()
        self._backend_pid: int | None = None
        self._one_at_a_time = asyncio.Lock()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While ids may be taken. Only when nothing is unsettled."""
        for name in self._names:
            self._hold.enter_context(self._streams.writing(name))
        try:
            yield
        except LOST:
            raise
        except StorageError:
            self._backend_pid = None
            raise
        finally:
            if self._backend_pid is None:
                self._hold.close()
            else:
                self._streams.unsettled[self.settle] = None

    def sent(self, conn: Connection) -> None:
        """From here on it is not known what is done."""
        self._backend_pid = conn.backend_pid

    def answered(self) -> None:
        """It is known again."""
        self._backend_pid = None

    async def settle(self) -> Mapping[str, Sequence[Fact]]:
        """Find out what became of a lost write, and tell its facts, if it was done: they are given back by stream.

        Nothing to do: nothing is done. `DatabaseUnavailable` if there is nobody to ask; the ids stay held then.
        """
        async with self._one_at_a_time:
            if self.settle not in self._streams.unsettled:
                return {}
            async with self._database.connection() as conn:
                await self._end_backend(conn)
                missed = await missed_facts(conn, self._streams, self._names)
            del self._streams.unsettled[self.settle]
            self._backend_pid = None
            self._hold.close()
            for name, (position, facts) in missed.items():
                self._streams.advance(name, self._streams.instance_name, position, facts)
            return {name: facts for name, (_, facts) in missed.items() if facts}

    async def _end_backend(self, conn: Connection) -> None:
        """Make sure that nobody works at it any more."""
        for _ in range(ATTEMPTS):
            if await conn.fetchval(SQL_END_BACKEND, self._backend_pid, self._streams.instance_name):
                return
        message = f"the backend {self._backend_pid} of a lost connection does not end"
        raise DatabaseUnavailable(message)
