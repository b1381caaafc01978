"""The pool, transactions and typed rows: the only place where the driver is called.

`Database` owns the pool. Every function that touches Postgres takes a `Connection` first. No
exception of the driver leaves this module: `translate` turns each into one of ours. It does not
open transactions on its own, cache results, or build SQL.

    async with database.transaction() as conn:
        rooms = await conn.fetch(SQL_ROOMS, user_nid, row=RoomRow)

    await database.run(lambda conn: store_batch(conn, batch))  # repeated on a conflict

Rows with bytes of events are ready to be decoded (`storage.database.dictionaries`), also where
these are in the archive.

Connections keep no state between uses (no SET, no session locks, no open cursors). So nothing is
reset when one returns to the pool, which would cost a round trip each time.
`storage.database.session` has their settings.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from time import perf_counter
from typing import Any, Final, LiteralString, NamedTuple, Protocol, Self, TypeVar

import asyncpg

from storage.config import Config
from storage.database.archived_bytes import ArchiveAccess, open_access
from storage.database.dictionaries import load_for
from storage.database.dsn import DsnServer
from storage.database.placeholders import long_lists_as_text
from storage.database.pool import Isolation, Pool, begun
from storage.database.prepared import PreparedAhead
from storage.database.row_types import maker, stored_fields
from storage.database.session import Connector, Guard, Session
from storage.database.translate import (
    CONNECTING_ERRORS,
    DRIVER_ERRORS,
    is_refused_write,
    role_of,
    translate,
    translate_connecting,
)
from storage.errors import (
    DatabaseConflict,
    DatabaseReplaced,
    DatabaseUnavailable,
    ReadOnly,
    StorageClosed,
    StorageError,
    UnknownRoom,
)
from storage.ids import RoomId
from storage.observability.counters import Measures
from storage.turns import mapped

ATTEMPTS_MAX: Final = 5
"""Most attempts of a transaction that meets conflicts or an unavailable server."""

RETRY_MS_FIRST: Final = (
    5  # upper bound of the pause before the second attempt; it doubles each time
)
RETRY_MS_MAX: Final = 500  # largest upper bound

T = TypeVar("T")
R = TypeVar("R", bound=NamedTuple)
"""The row type of a statement (`storage.database.row_types`)."""


class Observer(Protocol):
    """Called for every statement, BEGIN and COMMIT included.

    ROLLBACK is not reported, because it never is the statement that failed. Use it for metrics, to
    count round trips, and to inject faults: an exception from `before` replaces the statement.
    """

    def before(self, statement: str) -> None:
        """Handle a statement that is about to be sent."""

    def after(self, statement: str, seconds: float) -> None:
        """Handle a statement whose result has arrived; one that failed is not reported."""


class Connection:
    """One connection, inside or outside a transaction.

    Parameters are numbered (`$1`), with casts in the statement.
    """

    __slots__ = ("_driver", "_measures", "_observer", "_session", "is_at_rest", "statements")

    def __init__(
        self,
        driver: Any,
        observer: Observer | None = None,
        measures: Measures | None = None,
        session: Session | None = None,
    ) -> None:
        self._driver = driver
        self._session = session
        self._observer = observer
        self._measures = measures
        self.statements: int = 0
        """Statements sent, BEGIN and COMMIT included."""
        self.is_at_rest: bool = True
        """Whether the last statement has ended.

        False after a cancelled statement, which may still run on the server.
        """

    async def fetch(self, sql: str, *args: object, row: type[R]) -> list[R]:
        """Return all rows, each as a `row`."""
        return await mapped(maker(row), await self._records(sql, args, row))

    async def records(self, sql: str, *args: object, row: type[R]) -> list[Any]:
        """Return all rows as the driver's records, columns by position; `row` names them.

        For thousands of rows that are processed at once.
        """
        return await self._records(sql, args, row)

    async def fetchrow(self, sql: str, *args: object, row: type[R]) -> R | None:
        """Return the first row as a `row`, or None."""
        record = await self._call(sql, self._driver.fetchrow, sql, *args)
        if record is None:
            return None
        if positions := stored_fields(row):
            [record] = await load_for(self, [record], positions)
        made: R = maker(row)(record)
        return made

    async def fetchval(self, sql: str, *args: object) -> Any:
        """Return the first column of the first row, or None."""
        return await self._call(sql, self._driver.fetchval, sql, *args)

    async def fetchvals(self, sql: str, *args: object) -> list[Any]:
        """Return the first column of all rows."""
        records = await self._call(sql, self._driver.fetch, sql, *args)
        return await mapped(lambda record: record[0], records)

    async def execute(self, sql: str, *args: object) -> str:
        """Run a statement and return its tag, such as `INSERT 0 3`.

        Without arguments it may be several statements, separated by semicolons.
        """
        return str(await self._call(sql, self._driver.execute, sql, *args))

    async def copy_in(
        self, table: str, columns: Sequence[str], records: Iterable[Sequence[object]]
    ) -> int:
        """COPY `records` into `table`, binary; return the number of rows.

        For bulk work: one transaction, no ON CONFLICT.
        """

        async def copy() -> str:
            return str(
                await self._driver.copy_records_to_table(table, columns=columns, records=records)
            )

        return int((await self._call(f"COPY {table}", copy)).rpartition(" ")[2])

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open, also one that has failed."""
        return not self._driver.is_closed() and bool(self._driver.is_in_transaction())

    @property
    def is_closed(self) -> bool:
        """Return whether the session has ended here; if not, its last statement has in the pool."""
        return bool(self._driver.is_closed())

    @property
    def backend_pid(self) -> int:
        """Return the process id of the server process of this connection."""
        pid = None if self._session is None else self._session.backend_pid
        return int(pid or self._driver.get_server_pid())

    @property
    def archive(self) -> ArchiveAccess:
        """Return what this session knows of the archive (`storage.database.archived_bytes`)."""
        return open_access() if self._session is None else self._session.archive

    @property
    def server(self) -> object:
        """Return the note of the pool's user about the server; None for a new session."""
        return None if self._session is None else self._session.server

    @server.setter
    def server(self, noted: object) -> None:
        if self._session is not None:
            self._session.server = noted

    async def _records(
        self, sql: str, args: tuple[object, ...], row: type[NamedTuple]
    ) -> list[Any]:
        rows: list[Any] = await self._call(sql, self._driver.fetch, sql, *args)
        if positions := stored_fields(row):
            return await load_for(self, rows, positions)
        return rows

    async def _call(
        self, statement: str, call: Callable[..., Awaitable[Any]], *args: object
    ) -> Any:
        """Send one statement between the observer's two calls; translate the driver's errors."""
        observer = self._observer
        self.is_at_rest = False
        self.statements += 1
        start = 0.0
        args = await long_lists_as_text(args)
        try:
            if observer is not None:
                observer.before(statement)
                start = perf_counter()
            result = await call(*args)
        except DRIVER_ERRORS as error:
            if isinstance(error, asyncpg.InternalClientError):
                # Postgres ended the idle session, and the driver has only half noticed it
                self._driver.terminate()
            self.is_at_rest = isinstance(error, asyncpg.PostgresError)
            is_closed, role = self._driver.is_closed(), role_of(self._driver)
            ours = self._counted(translate(error, closed=is_closed, role=role))
            if self._session is not None and self._session.is_read_only and is_refused_write(ours):
                raise ReadOnly from error
            raise ours from error
        except AttributeError as error:
            if not self._driver.is_closed():
                raise
            # asyncpg uses an attribute that closing has removed
            raise self._counted(DatabaseUnavailable("the connection was lost")) from error
        if self._session is not None and self._session.is_over:
            raise DatabaseUnavailable("the session was ended during a statement")
        self.is_at_rest = True
        if observer is not None:
            observer.after(statement, perf_counter() - start)
        return result

    def _counted(self, error: StorageError) -> StorageError:
        if self._measures is not None:
            self._measures.database_errors[type(error).__name__] += 1
        return error


Check = Callable[[Connection], Awaitable[bool]]
"""Return whether a new session leads to the same database as before."""


class Database:
    """The pool of one Postgres database.

    Opened with `await Database.open(dsn, config=…)`, closed with `close`.
    """

    def __init__(self, connect: Connector, config: Config, observer: Observer | None) -> None:
        size_min = min(config.pool_size_min, config.pool_size_max)
        self._pool = Pool(self._checked, size_min=size_min, size_max=config.pool_size_max)
        self.prepared: PreparedAhead = PreparedAhead(self._pool, read_only=connect.read_only)
        """Prepares declared statements on the sessions, while its `run` runs."""
        self._connect = connect
        self._config = config
        self._observer = observer
        self._check: Check | None = None
        self._cluster: str | None = None
        self.guard: Guard = Guard()
        """Whether the database is still the one that was entered; see `watch`."""
        self.measures: Measures = Measures()
        """Counters of all work on this database."""
        self._closed = False

    @classmethod
    async def open(
        cls,
        dsn: str,
        *,
        config: Config | None = None,
        observer: Observer | None = None,
        mark: str = "",
        read_only: bool = False,
        fill: bool = True,
    ) -> Self:
        """Connect.

        Raise `DatabaseUnavailable` if there is no answer, `InputError` if the DSN cannot be read or
        the database is not UTF8, `DatabaseError` otherwise. ``mark`` distinguishes the sessions of
        a writer from those of another one of the same name (`storage.streams.startup`). With
        ``read_only`` every write raises `ReadOnly`. Without ``fill`` the first connection is opened
        when it is needed.
        """
        config = config or Config()
        server = DsnServer(dsn)
        database = cls(Connector(server, config, mark, read_only=read_only), config, observer)
        try:
            if fill:
                await database._pool.fill()
        except CONNECTING_ERRORS as error:
            raise translate_connecting(error, server) from error
        return database

    async def close(self) -> None:
        """Wait for the connections in use, then close all. A second call does nothing."""
        self._closed = True
        self.guard.close()
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def config(self) -> Config:
        """Return the limits this database was opened with."""
        return self._config

    @property
    def connections(self) -> tuple[int, int, int]:
        """Return the number of open connections, of those in use, and of waiting callers."""
        return self._pool.size, self._pool.used, self._pool.waiting

    @property
    def connection_generation(self) -> int:
        """Return a number that changes when the database is replaced or entered again."""
        return self.guard.connection_generation

    def watch(self, check: "Check") -> None:
        """Check each new session with ``check`` from now on; False means: this is another database.

        Without it, a session of another cluster or timeline than the first one's raises
        `DatabaseReplaced`. After a failed check all sessions end, and nobody gets one before
        `Guard.enter_again`. Callers wait for `Config.pool_acquire_timeout_ms`, and then get
        `DatabaseReplaced`.
        """
        self._check = check

    async def confirm(self) -> None:
        """Check a new session now. Raise `DatabaseReplaced` if the database is another one."""
        connection_generation = self.connection_generation
        async with self.apart() as conn:
            await self._compare(conn, connection_generation)

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[Connection]:
        """Open a connection outside the pool and without check, to enter again or for locks."""
        try:
            session = await self._connect()
        except CONNECTING_ERRORS as error:
            raise translate_connecting(error, self._connect.server) from error
        try:
            yield Connection(session.driver, self._observer, self.measures, session)
        finally:
            session.end()

    async def _checked(self) -> Session:
        """Open a new session for the pool and check it."""
        if not self.guard.is_current:
            raise self.guard.error()
        connection_generation = self.connection_generation
        session = await self._connect()
        try:
            if self._check is None:
                self._expect(session)
            else:
                await self._compare(
                    Connection(session.driver, None, self.measures, session), connection_generation
                )
        except BaseException:
            session.end()
            raise
        return session

    def _expect(self, session: Session) -> None:
        """Raise `DatabaseReplaced` for another cluster or timeline.

        Numbers that a job has read may belong to other rows there. A session that only reads is
        compared by its user (`storage.streams.standby`).
        """
        if session.is_read_only:
            return
        self._cluster = self._cluster or session.cluster
        if session.cluster not in {None, self._cluster}:
            self._pool.end_all()
            raise DatabaseReplaced("the database was restored, or a standby took over: begin again")

    async def _compare(self, conn: Connection, connection_generation: int) -> None:
        """Check a session that was opened in ``connection_generation``.

        It may lead to another database than those of a later one.
        """
        is_same = self._check is None or await self._check(conn)
        if self.connection_generation == connection_generation and not is_same:
            self.guard.replaced()
            self._pool.end_all()
        if self.connection_generation != connection_generation:
            raise self.guard.error()

    def end_sessions(self, *, besides: Connection | None = None) -> None:
        """End all sessions but that of one connection, including those that are lent out."""
        self._pool.end_all(besides=None if besides is None else besides._session)  # noqa: SLF001

    def connection(self) -> "ConnectionUse":
        """Return a connection in autocommit, one transaction per statement, for `async with`."""
        return ConnectionUse(self)

    @asynccontextmanager
    async def transaction(
        self, *, isolation: Isolation = "read_committed", readonly: bool = False
    ) -> AsyncIterator[Connection]:
        """Yield a connection inside BEGIN … COMMIT.

        Roll back on any exception, also on cancellation.

        Raise `CommitUnknown` if the connection is lost between sending COMMIT and its answer, and
        `DatabaseUnavailable` if the transaction is read only.
        """
        async with self.connection() as conn, begun(conn, isolation=isolation, readonly=readonly):
            yield conn

    async def run(
        self,
        work: Callable[[Connection], Awaitable[T]],
        *,
        isolation: Isolation = "read_committed",
        readonly: bool = False,
    ) -> T:
        """Run `work` in a transaction, and repeat all of it on a conflict or lost connection.

        Conflicts are serialization failures, deadlocks and lock timeouts. There are at most
        `ATTEMPTS_MAX` attempts, with a random pause that doubles; then the last error is raised.
        `DatabaseUnavailable` is raised at once after `pool_acquire_timeout_ms`: the server hangs,
        or a statement is too slow. `work` must have no effects outside the connection. A commit
        with an unknown outcome is not repeated here (`CommitUnknown`): only the caller knows
        whether the work can be done twice.
        """
        last_repeat = perf_counter() + self._config.pool_acquire_timeout_ms / 1000
        for attempt in count(1):
            try:
                async with self.transaction(isolation=isolation, readonly=readonly) as conn:
                    return await work(conn)
            except (DatabaseConflict, DatabaseUnavailable) as error:
                is_late = isinstance(error, DatabaseUnavailable) and perf_counter() > last_repeat
                if is_late or attempt >= ATTEMPTS_MAX:
                    raise
                await asyncio.sleep(_pause(attempt))
        raise AssertionError("the last attempt returns or raises")

    async def acquire(self) -> Connection:
        """Return a connection; raise `DatabaseUnavailable` if none is free in time."""
        if self._closed:
            raise StorageClosed("database")
        session = self._pool.at_hand() if self.guard.is_current else None
        if session is None:
            session = await self._waited_for()
        return Connection(session.driver, self._observer, self.measures, session)

    async def _waited_for(self) -> Session:
        began = perf_counter()
        try:
            return await self._current(began + self._config.pool_acquire_timeout_ms / 1000)
        except CONNECTING_ERRORS as error:
            ours = translate_connecting(error, self._connect.server)
            self.measures.database_errors[type(ours).__name__] += 1
            raise ours from error
        finally:
            self.measures.pool_waits.add(perf_counter() - began)

    async def _current(self, deadline: float) -> Session:
        """Return a session with the entered database, however often that is replaced meanwhile."""
        while True:
            await self.guard.until_current(deadline - perf_counter())
            try:
                return await self._pool.take(deadline - perf_counter())
            except DatabaseReplaced:
                if self._check is None or self._closed or perf_counter() >= deadline:
                    raise

    async def release(self, conn: Connection) -> None:
        """Take a connection back. Wait first if a cancelled statement may still run."""
        session = conn._session  # noqa: SLF001  # the classes of this module are one thing in parts
        self.measures.statements += conn.statements
        if session is None:
            return
        if session.driver.is_closed() or (conn.is_at_rest and not conn.in_transaction):
            self._pool.give_back(session)
        else:
            await self._pool.settle(session)


class ConnectionUse:
    """A connection for the time of one block."""

    __slots__ = ("_conn", "_database")

    def __init__(self, database: Database) -> None:
        self._database = database

    async def __aenter__(self) -> Connection:
        self._conn = await self._database.acquire()
        return self._conn

    async def __aexit__(self, *_: object) -> None:
        await self._database.release(self._conn)


def _pause(attempt: int) -> float:
    """Return the seconds to wait after a failed attempt: random, to avoid a second conflict."""
    ceiling_ms = min(RETRY_MS_FIRST * 2 ** (attempt - 1), RETRY_MS_MAX)
    return random.uniform(0, ceiling_ms) / 1000  # noqa: S311  # no secret


# --------------------------------------------------------------------------------------------------
# The check whether the store has a room, for reads without a result.

SQL_ROOM_EXISTS: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM rooms WHERE room_id = $1::text)
"""


async def require_room(conn: Connection, room_id: RoomId) -> None:
    """Raise `UnknownRoom` if the store does not have the room."""
    if not await conn.fetchval(SQL_ROOM_EXISTS, room_id):
        raise UnknownRoom(room_id)
