"""The reads of a standby that has stopped to answer: they end, and the primary answers.

A standby may hang, and a read may be slow; its session says nothing in either case. So while a read
takes longer than SLOW_SECONDS, a new session asks whether the standby answers at all. A slow read
goes on for as long as it does. If there is no answer within ANSWER_SECONDS, all sessions and all
reads end, also those that wait for a session.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from storage.database.connection import Database
from storage.errors import DatabaseError, DatabaseUnavailable, StorageError

T = TypeVar("T")

SLOW_SECONDS: Final = 1.0
"""Time between two checks of a standby that is being read."""

ANSWER_SECONDS: Final = 3.0
"""Longest wait for the answer to a statement that takes a millisecond, and for a new session."""


class StandbyWatch:
    """The reads that go on in one pool, each with the limit that can end it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reads: dict[asyncio.Timeout, float] = {}  # when each began, in that order
        self._begun = asyncio.Event()
        self._answered_at = float("-inf")

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Run a read of the standby. Raise `DatabaseUnavailable` if that stops to answer."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._reads[limit] = time.monotonic()
                self._begun.set()
                try:
                    yield
                finally:
                    self._reads.pop(limit, None)
        except TimeoutError as error:
            if limit.expired():
                raise _no_answer() from error
            raise

    async def answer(self, statement: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a fast statement.

        If there is none in time, end all reads, and raise `DatabaseUnavailable`.
        """
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await statement()
        except TimeoutError as error:
            self.end_reads()
            raise _no_answer() from error
        self._answered_at = time.monotonic()
        return found

    def end_reads(self) -> None:
        """End all sessions, and all reads that go on."""
        self._database.end_sessions()  # first: then nothing asks the server to cancel a statement
        now = asyncio.get_running_loop().time()
        while self._reads:
            limit, _ = self._reads.popitem()
            limit.reschedule(now)

    async def run(self, rest: Callable[[str], None]) -> None:
        """Check the standby while reads take long, until cancelled.

        Call ``rest`` with the reason, and end the reads, if it does not answer.
        """
        while True:
            await self._begun.wait()
            await asyncio.sleep(SLOW_SECONDS)
            began = next(iter(self._reads.values()), None)
            if began is None:
                self._begun.clear()
            elif time.monotonic() - max(began, self._answered_at) >= SLOW_SECONDS:
                reason = await self._failure()
                if reason is not None:
                    rest(reason)
                    self.end_reads()

    async def _failure(self) -> str | None:
        """Open a session. Return why the standby does not answer; None if it does, or refuses."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._database.apart():
                self._answered_at = time.monotonic()
        except TimeoutError:
            return _no_answer().reason
        except StorageError as error:
            if isinstance(error, DatabaseError) and error.sqlstate:
                return None  # such as too many connections
            return str(error)
        return None


def _no_answer() -> DatabaseUnavailable:
    return DatabaseUnavailable(f"no answer within {ANSWER_SECONDS:g} s")
