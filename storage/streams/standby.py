"""One standby: the state that it has reached, as this process knows it, and reads that wait.

A read needs the facts of the caller's tokens, and all that this process has published or returned
before. So the reads of a client that stays with one process never go back. A process reads what it
wrote, and its caches are never filled from a state before one that has emptied them. The second
part is known in two forms: the last fact of each writer in each stream (``followed``), and the
flushed position of the primary's write-ahead log (``floor``). The floor is asked for after the
process has used the primary in a way that no position describes, such as a read there.

The state is known for one server, from its start to its end. Every new session is compared
with it. A session of another server, or of one that has gone back after a crash, ends all others,
and raises the floor. Without a primary, a standby that has crashed is read once it has replayed all
WAL on its disk. So a DSN must lead to one standby: with several behind one address reads are
right, but sessions end all the time.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Final, TypeVar

from storage.database.connection import Connection, Database
from storage.database.pool import begun
from storage.errors import (
    CommitUnknown,
    DatabaseConflict,
    DatabaseError,
    DatabaseUnavailable,
    ReplicaBehind,
    StorageError,
)
from storage.observability.counters import Outage
from storage.streams.feed import (
    NOTHING,
    SQL_FLUSHED,
    SQL_REPLAYED,
    Advance,
    Followed,
    Need,
    StandbyState,
    StandbyStateRow,
)
from storage.streams.reads import Work
from storage.streams.registry import Restart, Streams

# --------------------------------------------------------------------------------------------------
# The reads of a standby that has stopped to answer: they end, and the primary answers.
#
# A standby may hang, and a read may be slow; its session says nothing in either case. So while a
# read takes longer than SLOW_SECONDS, a new session asks whether the standby answers at all. A slow
# read goes on for as long as it does. If there is no answer within ANSWER_SECONDS, all sessions and
# all reads end, also those that wait for a session.

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
                result = await statement()
        except TimeoutError as error:
            self.end_reads()
            raise _no_answer() from error
        self._answered_at = time.monotonic()
        return result

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


logger: logging.Logger = logging.getLogger(__name__)


POLL_SECONDS_MIN: Final = 0.001
POLL_SECONDS_MAX: Final = 0.032
"""Pauses between two polls of a standby that is waited for; they double."""

REST_SECONDS_FIRST: Final = 0.1
REST_SECONDS_MAX: Final = 10.0
"""Pauses between two trials of a standby that failed or is behind; they double."""

SESSIONS_TRIED_MAX: Final = 32
"""New sessions that one read opens: each is compared before it is used."""


class OtherDatabaseError(DatabaseError):
    """The address leads to a database that is no copy of the primary's: correct it."""


class Standby:
    """A pool of sessions on one standby, or on the server that a read-only store has.

    ``primary`` is None for a read-only store. ``reload`` reads the lost positions again, after a
    restore that the standby has replayed.
    """

    def __init__(
        self,
        database: Database,
        streams: Streams,
        deployment_id: str,
        *,
        primary: Database | None = None,
        reload: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        self.database = database
        self.deployment_id: str = deployment_id
        self._streams = streams
        self._primary = primary
        self._reload = reload
        self._followed: Followed = {}
        self._replayed = StandbyState()
        self._server: object = None  # a new object for each server, noted in its sessions
        self._name = ""
        self._floor = 0
        self._streams_wal = False  # it has, and does so again after it has replayed its own WAL
        self._uses = 1  # of the primary, and new sessions
        self._confirmed = 0  # uses that the floor includes
        self._polled_at = float("-inf")
        self._polls = 0
        self._polling = asyncio.Lock()
        self._confirming = asyncio.Lock()
        self._resting = asyncio.Event()
        self._outage = Outage(logger, "the standby")
        self._watch = StandbyWatch(database)
        streams.feed.subscribe(self._on_advance)
        streams.on_restart(self._restart)

    # ---------------------------------------------------------------------------------------------
    # what this process knows

    def _on_advance(self, advance: Advance) -> None:
        if advance.rows:
            key = advance.stream_name, advance.instance_name
            self._followed = {**self._followed, key: advance.rows[-1].stream_id}

    def _restart(self, _: Restart) -> None:
        """Forget all numbers: the primary was replaced, and some of them may be lost."""
        self._followed, self._replayed, self._server = {}, StandbyState(), None
        self._floor = 0
        self.note_use()

    def note_use(self) -> None:
        """Record that a caller has seen the primary: later reads must not go back behind that."""
        self._uses += 1

    # ---------------------------------------------------------------------------------------------
    # reads

    async def read(self, work: Work[T], need: Need = NOTHING, *, snapshot: bool = False) -> T:
        """Run a read that includes ``need``, and all that this process knows.

        ``snapshot``: all its statements read one state. Raise `ReplicaBehind` after
        `Config.replica_wait_ms`, `ResyncNeeded` for a token of lost facts.
        """
        async with self._watch.reading():
            for _ in range(SESSIONS_TRIED_MAX):
                await self.ready(need)
                need.refuse_lost(self._streams)
                async with self.database.connection() as conn:
                    if self._server is not None and conn.server is self._server:
                        return await _done(work, conn, snapshot=snapshot)
                    async with self._polling:
                        await self._read_state(conn)
        raise DatabaseUnavailable("the DSN of the standby leads to several servers")

    async def ready(self, need: Need = NOTHING) -> None:
        """Wait until the standby has replayed a need, and all that this process knows now."""
        followed = self._followed
        await self._confirm()
        if self._primary is not None and not self._replayed.has_events(need.events_upto):
            self.note_use()  # the primary knows that event: all it has flushed by now is enough
            await self._confirm()
            need = Need(need.tokens)
        floor = self._floor
        if not (self._is_fresh() and self._has(need, followed, floor)):
            await self._wait(need, followed, floor)

    def _has(self, need: Need, followed: Followed, floor: int) -> bool:
        state = self._replayed
        return (
            state.wal >= floor
            and not state.is_replaying_again
            and state.lost_upto == self._lost_upto()
            and state.has_followed(followed)
            and state.has(need)
        )

    async def _wait(self, need: Need, followed: Followed, floor: int) -> None:
        """Poll until the standby has replayed this. Raise `ReplicaBehind` on a timeout."""
        began, wait_ms = perf_counter(), self.database.config.replica_wait_ms
        pause = POLL_SECONDS_MIN
        try:
            while True:
                await self._poll()
                if self._has(need, followed, floor):
                    return
                left = wait_ms / 1000 - (perf_counter() - began)
                if left <= 0:
                    self._raise_replica_behind(
                        f"it has not replayed this within {wait_ms} ms", followed, floor
                    )
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, POLL_SECONDS_MAX)
        finally:
            self.database.measures.replica_waits.add(perf_counter() - began)

    def _raise_replica_behind(self, reason: str, followed: Followed, floor: int) -> None:
        """Raise `ReplicaBehind`. Rest if all reads would wait: a token alone may be a wrong one."""
        if self._primary is not None and not self._has(NOTHING, followed, floor):
            self.rest(reason)
        raise ReplicaBehind(f"the standby is behind: {reason}")

    async def _confirm(self) -> None:
        """Raise the floor to what the primary has flushed, if it was used since the last time."""
        needed = self._uses
        if self._primary is None or self._confirmed >= needed:
            return
        async with self._confirming:
            while self._confirmed < needed:
                connection_generation, uses = self._primary.connection_generation, self._uses
                async with self._primary.connection() as conn:
                    flushed = int(await conn.fetchval(SQL_FLUSHED))
                if connection_generation == self._primary.connection_generation:
                    self._floor, self._confirmed = max(self._floor, flushed), uses

    # ---------------------------------------------------------------------------------------------
    # the state of the standby

    def _is_fresh(self) -> bool:
        """Return whether the last poll is recent: a promotion must be noticed."""
        return time.monotonic() - self._polled_at < self.database.config.follow_ms / 1000

    async def _poll(self) -> None:
        """Read the state of the standby, unless another caller has done so meanwhile."""
        seen = self._polls
        # the connection first: a holder of the lock must not wait for one
        async with self.database.connection() as conn, self._polling:
            is_recent = time.monotonic() - self._polled_at < POLL_SECONDS_MIN
            if self._polls == seen and not is_recent:
                await self._read_state(conn)

    async def _read_state(self, conn: Connection) -> None:
        """Read the state of the server of a session. Only one caller does so at a time."""
        row = await self._watch.answer(lambda: conn.fetchrow(SQL_REPLAYED, row=StandbyStateRow))
        if row is None:
            raise DatabaseUnavailable("the standby has no store yet")
        if row.deployment_id != self.deployment_id:
            raise OtherDatabaseError("the DSN of the standby leads to another database")
        if self._primary is not None and not row.is_standby:
            self._server = None
            raise DatabaseUnavailable("the server is no standby any more: it was promoted")
        if conn.server is None or conn.server is not self._server:
            self._meet(conn, row)
        self._replayed = StandbyState.of(row, is_replaying_again=self._is_replaying_again(row))
        self._polled_at = time.monotonic()
        self._polls += 1
        if self._reload is not None and row.lost_upto != self._lost_upto():
            await self._reload(conn)

    def _meet(self, conn: Connection, row: StandbyStateRow) -> None:
        """Compare a new session with the known server, and note that it leads there."""
        is_back = row.wal < self._replayed.wal
        if self._server is None or row.server != self._name or is_back:
            self._floor = max(self._floor, self._replayed.wal)
            self._name, self._server = row.server, object()
            self.database.end_sessions(besides=conn)
        conn.server = self._server
        self.note_use()  # reads of an earlier session may have seen more

    def _is_replaying_again(self, row: StandbyStateRow) -> bool:
        """Return whether a server without a primary has crashed, and may be behind earlier reads.

        It replays only WAL that it has flushed. So a standby that has streamed, and does so again,
        has replayed all that it had before.
        """
        if self._primary is not None or not row.is_standby:
            return False
        self._streams_wal |= row.has_streamed
        return self._streams_wal and not row.has_streamed

    def _lost_upto(self) -> int:
        return max((lost.upto for lost in self._streams.lost.values()), default=0)

    # ---------------------------------------------------------------------------------------------
    # rest after a failure

    @property
    def is_resting(self) -> bool:
        """Return whether reads should leave this standby alone for now."""
        return self._resting.is_set()

    async def begin(self) -> None:
        """Compare the server with the primary. Leave one alone that is not ready yet."""
        try:
            async with self.database.connection() as conn, self._polling:
                await self._read_state(conn)
        except DatabaseUnavailable as error:
            self.rest(str(error))

    def rest(self, reason: str) -> None:
        """Leave the standby alone until it is ready again."""
        self._outage.failed(f"reads go to the primary, not to the standby: {reason}")
        self._resting.set()

    async def watch(self) -> None:
        """End the reads of a standby that stops to answer, until cancelled."""
        await self._watch.run(self.rest)

    async def keep(self) -> None:
        """Try a resting standby again and again, until cancelled."""
        while True:
            await self._resting.wait()
            pause = REST_SECONDS_FIRST
            while self._resting.is_set():
                await asyncio.sleep(pause)
                try:
                    await self.ready()
                except StorageError as error:
                    self.rest(str(error))
                    pause = min(2 * pause, REST_SECONDS_MAX)
                else:
                    self._resting.clear()
                    self._outage.recovered()


async def _done(work: Work[T], conn: Connection, *, snapshot: bool) -> T:
    """Run a read. Raise `DatabaseConflict` if the standby cancels it, or ends its session."""
    try:
        if not snapshot:
            return await work(conn)
        async with begun(conn, isolation="repeatable_read", readonly=True):
            return await work(conn)
    except (DatabaseUnavailable, CommitUnknown) as error:
        raise DatabaseConflict(f"the session ended during a read: {error.reason}") from error
