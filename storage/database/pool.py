"""The open sessions of one database: lent out, returned, and handed to waiting callers in order.

Postgres may refuse another session (`max_connections`, or a limit of the role). Callers then wait
for a session that is open already, and one of them tries again every REFUSED_SECONDS. An error is
raised only where no session is open, or after the timeout.

A session that is lent out again keeps its prepared statements, and nothing is reset: users of a
session leave no state behind.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal, LiteralString

import asyncpg

from storage.database.session import Session
from storage.database.translate import DRIVER_ERRORS
from storage.errors import CommitUnknown, DatabaseError, DatabaseUnavailable, StorageClosed

REFUSED_SECONDS: Final = 0.5
"""Pause before opening another session after Postgres has refused one."""

IDLE_SECONDS_MAX: Final = 300
"""Idle sessions end after this time, except ``size_min`` of them."""

SETTLE_SECONDS: Final = 10
"""Longest wait for the end of a statement that was cancelled, and for that of idle sessions."""

PREPARING_SECONDS: Final = 0.05
"""Longest wait for a session that prepares statements, before another one is opened instead."""


class Pool:
    """At most ``size_max`` sessions, opened by ``connect`` when they are needed.

    Errors are those of the driver.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[Session]], *, size_min: int, size_max: int
    ) -> None:
        self.waiting: int = 0
        """How many callers wait for a session."""
        self._connect = connect
        self._size_min = size_min
        self._size_max = size_max
        self._opening = 0
        self._open: dict[Session, None] = {}
        self._idle: list[Session] = []  # the last used one is lent out first
        self._turns: deque[asyncio.Future[Session | None]] = deque()
        self._refusal: asyncpg.TooManyConnectionsError | None = None
        self._refused_until = 0.0
        self._all_back = asyncio.Event()
        self._closed = False
        self.returned: asyncio.Event = asyncio.Event()
        """Set when a session becomes idle."""
        self._back_by = 0.0  # when the session that prepares statements should be back

    @property
    def size(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    @property
    def used(self) -> int:
        """Return the number of sessions that are lent out."""
        return len(self._open) - len(self._idle)

    async def fill(self) -> None:
        """Open the first ``size_min`` sessions. If one cannot be opened, none stays open."""
        opening = [asyncio.ensure_future(self._open_session()) for _ in range(self._size_min)]
        try:
            for session in await asyncio.gather(*opening):
                self.give_back(session)
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            self.end_all()
            raise

    async def add_idle(self) -> None:
        """Open a session if none is idle and another one is allowed."""
        if not self._idle and self._may_open():
            self.give_back(await self._open_session())

    def lacks(self, statements: int) -> bool:
        """Return whether a session, lent out or not, has fewer prepared statements than these."""
        return any(session.prepared < statements for session in self._open)

    def lend_unprepared(self, statements: int) -> Session | None:
        """Lend an idle session with fewer prepared statements than these, for a short time."""
        lacking = [session for session in self._idle if session.prepared < statements]
        if not lacking or self._closed:
            return None
        session = max(lacking, key=lambda candidate: candidate.prepared)
        self._idle.remove(session)
        self._back_by = asyncio.get_running_loop().time() + PREPARING_SECONDS
        return session

    def at_hand(self) -> Session | None:
        """Return an idle session, or None."""
        while self._idle:
            session = self._idle.pop()
            if not session.driver.is_closed():
                return session
            self._drop(session)
        return None

    async def take(self, seconds: float) -> Session:
        """Return a session.

        Raise `TimeoutError`, or the refusal of Postgres, if none is free in time. Raise
        `StorageClosed` after `close`.
        """
        self.waiting += 1
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await self._idle_or_new()
        except TimeoutError:
            if not limit.expired():
                raise  # of a new session: the server does not answer
            raise self._refusal or TimeoutError(
                f"no session was free within {seconds:g} s"
            ) from None
        finally:
            self.waiting -= 1

    def give_back(self, session: Session) -> None:
        """Take a session back, and hand it to the longest waiting caller, if there is one."""
        if session.driver.is_closed():
            self._drop(session)
            return
        self._all_back.set()
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(session)
                return
        session.idle_since = asyncio.get_running_loop().time()
        self._back_by = 0.0
        # lent out last, as long as another one is further
        has_fewer_prepared = self._idle and session.prepared < self._idle[-1].prepared
        self._idle.insert(0 if has_fewer_prepared else len(self._idle), session)
        self.returned.set()
        self._end_idle(session.idle_since)

    async def settle(self, session: Session) -> None:
        """Take a session back when a cancelled statement has ended.

        End it if that takes too long.
        """
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                # The driver sends nothing before the cancelled statement has ended.
                await session.driver.execute(
                    "ROLLBACK" if session.driver.is_in_transaction() else "SELECT"
                )
        except BaseException as error:
            session.driver.terminate()
            if not isinstance(error, Exception):
                raise
        finally:
            self.give_back(session)

    def end_all(self, *, besides: Session | None = None) -> None:
        """End all sessions, including those that are lent out."""
        for session in list(self._open):
            if session is not besides:
                session.end()
                if session in self._idle:
                    self._idle.remove(session)
                    self._drop(session)

    async def close(self) -> None:
        """Wait for the sessions that are lent out, then end all.

        Waiting callers get `StorageClosed`.
        """
        self._closed = True
        self._wake(len(self._turns))
        try:
            while self._open or self._opening:
                if self._idle:
                    await self._end_gently(self._idle.pop())
                else:
                    self._all_back.clear()
                    await self._all_back.wait()
        except BaseException:
            self.end_all()
            raise

    async def _idle_or_new(self) -> Session:
        while True:
            if self._closed:
                raise StorageClosed("database")
            if (session := self.at_hand()) is not None:
                return session
            if self._may_open():
                try:
                    return await self._open_session()
                except asyncpg.TooManyConnectionsError as error:
                    if not self._open:
                        raise
                    self._refusal, self._refused_until = (
                        error,
                        asyncio.get_running_loop().time() + REFUSED_SECONDS,
                    )
            elif (session := await self._turn()) is not None:
                return session

    def _may_open(self) -> bool:
        """Return whether to try to open one more session.

        After a refusal, one caller tries at a time.
        """
        if len(self._open) + self._opening >= self._size_max:
            return False
        now = asyncio.get_running_loop().time()
        if now < self._back_by and not self._turns:
            return False
        if self._refusal is None:
            return True
        if now < self._refused_until:
            return False
        self._refused_until = now + REFUSED_SECONDS
        return True

    async def _open_session(self) -> Session:
        self._opening += 1
        try:
            session = await self._connect()
        except BaseException:
            self._opening -= 1
            self._left()
            raise
        self._opening -= 1
        self._open[session] = None
        if self._closed:
            session.end()
            self._drop(session)
            raise StorageClosed("database")
        if self._refusal is not None:
            self._refusal = None
            self._wake(len(self._turns))
        return session

    async def _turn(self) -> Session | None:
        """Wait for a returned session, or return None when it is worth trying to open one."""
        turn: asyncio.Future[Session | None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await asyncio.wait([turn], timeout=self._pause())
        except BaseException:
            if turn.done():
                self._pass_on(turn.result())
            raise
        finally:
            if not turn.done():
                self._turns.remove(turn)
        return turn.result() if turn.done() else None

    def _pause(self) -> float | None:
        """Return the seconds after which opening a session is worth a try, or None."""
        if len(self._open) + self._opening >= self._size_max:
            return None
        now = asyncio.get_running_loop().time()
        if now < self._back_by:
            return self._back_by - now
        return None if self._refusal is None else max(self._refused_until - now, 0.001)

    def _pass_on(self, session: Session | None) -> None:
        """Hand on the turn of a caller that is gone."""
        if session is None:
            self._wake(1)
        else:
            self.give_back(session)

    def _wake(self, number: int) -> None:
        """Let this number of callers try to open a session."""
        while self._turns and number > 0:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                number -= 1

    def _drop(self, session: Session) -> None:
        """Remove a session that is closed or useless."""
        if not session.driver.is_closed():
            session.driver.terminate()
        self._open.pop(session, None)
        self._left()

    def _left(self) -> None:
        """Signal that there is room for another session."""
        self._all_back.set()
        self._wake(1)

    def _end_idle(self, now: float) -> None:
        """End sessions that have been idle for too long."""
        while (
            self._idle
            and len(self._open) > self._size_min
            and self._idle[0].idle_since + IDLE_SECONDS_MAX < now
        ):
            self._drop(self._idle.pop(0))

    async def _end_gently(self, session: Session) -> None:
        """Wait until a session has ended. Wait for no other one if the server does not answer."""
        try:
            await session.driver.close(timeout=SETTLE_SECONDS)
        except TimeoutError:
            while self._idle:
                self._drop(self._idle.pop())
        finally:
            self._drop(session)


# --------------------------------------------------------------------------------------------------
# BEGIN, COMMIT and ROLLBACK on an open connection.

if TYPE_CHECKING:
    from storage.database.connection import Connection

Isolation = Literal["read_committed", "repeatable_read", "serializable"]

BEGIN: Final[dict[tuple[Isolation, bool], LiteralString]] = {
    ("read_committed", False): "BEGIN",
    ("read_committed", True): "BEGIN READ ONLY",
    ("repeatable_read", False): "BEGIN ISOLATION LEVEL REPEATABLE READ",
    ("repeatable_read", True): "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
    ("serializable", False): "BEGIN ISOLATION LEVEL SERIALIZABLE",
    ("serializable", True): "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY",
}


@asynccontextmanager
async def begun(
    conn: "Connection", *, isolation: Isolation = "read_committed", readonly: bool = False
) -> AsyncIterator["Connection"]:
    """Run a block in a transaction on an open connection, as `Database.transaction`."""
    try:
        await conn.execute(BEGIN[isolation, readonly])
        yield conn
        await _commit(conn, readonly=readonly)
    except BaseException:
        await _roll_back(conn)
        raise


async def _commit(conn: "Connection", *, readonly: bool) -> None:
    """COMMIT, and check the tag: a transaction that an error has aborted answers ROLLBACK."""
    try:
        tag = await conn.execute("COMMIT")
    except DatabaseUnavailable as error:
        if readonly:
            raise  # nothing was written, whatever the outcome
        raise CommitUnknown(error.reason, sqlstate=error.sqlstate) from error
    if tag != "COMMIT":
        message = "the transaction was rolled back: an error inside it was caught and not passed on"
        raise DatabaseError(message)


async def _roll_back(conn: "Connection") -> None:
    """Leave no transaction open, in whatever state.

    Drop a connection that cannot be rolled back.
    """
    driver = conn._driver  # noqa: SLF001  # the two classes are one thing in two parts
    if driver.is_closed():
        return
    try:
        await driver.execute("ROLLBACK", timeout=10)
    except DRIVER_ERRORS:
        driver.terminate()
    except asyncio.CancelledError:
        driver.terminate()
        raise
