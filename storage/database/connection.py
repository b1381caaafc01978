"""The pool, transactions and typed rows: the only place where the driver is called.

`Database` owns the pool; `Connection` is what every function that touches Postgres takes first. No exception of the driver
leaves this module: `translate` turns each into one of ours. It does not open transactions on its own, cache results, or
build SQL.

    async with database.transaction() as conn:
        rooms = await conn.fetch(SQL_ROOMS, user_nid, row=RoomRow)

    await database.run(lambda conn: store_batch(conn, batch))   # repeats the whole work on a conflict

Connections keep no state between uses (no SET, no session locks, no open cursors): that is why nothing is reset when one goes
back to the pool, which would cost a round trip each time.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, Final, Literal, LiteralString, NamedTuple, Protocol, Self, TypeVar

import asyncpg

from storage.config import Config
from storage.database.translate import DRIVER_ERRORS, translate
from storage.errors import CommitUnknown, DatabaseConflict, DatabaseError, DatabaseUnavailable, StorageClosed
from storage.measures import Measures

T = TypeVar("T")

Isolation = Literal["read_committed", "repeatable_read", "serializable"]

BEGIN: Final[dict[tuple[Isolation, bool], LiteralString]] = {
    ("read_committed", False): "BEGIN",
    ("read_committed", True): "BEGIN READ ONLY",
    ("repeatable_read", False): "BEGIN ISOLATION LEVEL REPEATABLE READ",
    ("repeatable_read", True): "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
    ("serializable", False): "BEGIN ISOLATION LEVEL SERIALIZABLE",
    ("serializable", True): "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY",
}


AT_HAND: Final = 2
"""Connections that are kept out of the pool between uses, at most: that of the writer, and one for who reads."""

R = TypeVar("R", bound=NamedTuple)
"""The row type of a statement: its fields are the columns, in order."""


class Observer(Protocol):
    """Told of every statement, BEGIN and COMMIT included (ROLLBACK is not: it is how a failure ends, never its place).

    For metrics, for counting round trips, and for fault injection: what `before` raises takes the place of the statement.
    """

    def before(self, statement: str) -> None:
        """The statement is about to be sent."""

    def after(self, statement: str, seconds: float) -> None:
        """Its answer has come. Not called for a statement that failed."""


class Connection:
    """One connection, inside or outside a transaction. Parameters are numbered (`$1`), with casts in the statement."""

    __slots__ = ("_driver", "_measures", "_observer", "is_at_rest", "statements")

    def __init__(self, driver: Any, observer: Observer | None = None, measures: Measures | None = None) -> None:
        self._driver = driver
        self._observer = observer
        self._measures = measures
        self.statements = 0
        """How many were sent, BEGIN and COMMIT included."""
        self.is_at_rest = True
        """Whether the last statement came to its end: it neither failed nor was cancelled, so nothing of it can be on its way still."""

    async def fetch(self, sql: str, *args: object, row: type[R]) -> list[R]:
        """All rows, each as a `row`."""
        return list(map(row._make, await self._call(sql, self._driver.fetch, sql, *args)))  # NamedTuple's public method

    async def records(self, sql: str, *args: object, row: type[R]) -> list[Any]:  # noqa: ARG002  # says what the columns are
        """All rows as the driver gives them, columns by place; `row` names them. For thousands of rows that are taken apart at once."""
        rows: list[Any] = await self._call(sql, self._driver.fetch, sql, *args)
        return rows

    async def fetchrow(self, sql: str, *args: object, row: type[R]) -> R | None:
        """The first row as a `row`, or None."""
        record = await self._call(sql, self._driver.fetchrow, sql, *args)
        return None if record is None else row._make(record)  # NamedTuple's public method

    async def fetchval(self, sql: str, *args: object) -> Any:
        """The first column of the first row, or None."""
        return await self._call(sql, self._driver.fetchval, sql, *args)

    async def fetchvals(self, sql: str, *args: object) -> list[Any]:
        """The first column of all rows."""
        return [record[0] for record in await self._call(sql, self._driver.fetch, sql, *args)]

    async def execute(self, sql: str, *args: object) -> str:
        """Run a statement (without arguments also several, separated by semicolons); its tag, such as `INSERT 0 3`."""
        return str(await self._call(sql, self._driver.execute, sql, *args))

    async def copy_in(self, table: str, columns: Sequence[str], records: Iterable[Sequence[object]]) -> int:
        """COPY `records` into `table`, binary; the number of rows. For bulk work: one transaction, no ON CONFLICT."""

        async def copy() -> str:
            return str(await self._driver.copy_records_to_table(table, columns=columns, records=records))

        return int((await self._call(f"COPY {table}", copy)).rpartition(" ")[2])

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, also one that has failed."""
        return bool(self._driver.is_in_transaction())

    @property
    def backend_pid(self) -> int:
        """The server process behind this connection."""
        return int(self._driver.get_server_pid())

    async def _call(self, statement: str, call: Callable[..., Awaitable[Any]], *args: object) -> Any:
        """Send one statement between the observer's two calls, and translate what the driver raises."""
        observer = self._observer
        self.is_at_rest = False
        self.statements += 1
        start = 0.0
        try:
            if observer is not None:
                observer.before(statement)
                start = perf_counter()
            result = await call(*args)
        except DRIVER_ERRORS as error:
            if isinstance(error, asyncpg.InternalClientError):
                self._driver.terminate()  # Postgres has ended the session while it was idle, and the driver is halfway to know it
            told = translate(error, closed=_is_closed(self._driver))
            if self._measures is not None:
                self._measures.database_errors[type(told).__name__] += 1
            raise told from error
        self.is_at_rest = True
        if observer is not None:
            observer.after(statement, perf_counter() - start)
        return result


class Database:
    """The pool of one Postgres database. Opened with `await Database.open(dsn, config=…)`, closed with `close`."""

    def __init__(self, pool: Any, config: Config, observer: Observer | None) -> None:
        self._pool = pool
        self._config = config
        self._observer = observer
        self.measures = Measures()
        """What is counted of everything that works on this database."""
        self._closed = False
        self._at_hand: list[Any] = []
        self._waiting = 0

    @classmethod
    async def open(cls, dsn: str, *, config: Config | None = None, observer: Observer | None = None, mark: str = "") -> Self:
        """Connect. `DatabaseUnavailable` if nobody answers, `InputError` if the DSN cannot be read, `DatabaseError` otherwise.

        ``mark`` tells the sessions of a writer from those of another one of the same name (`storage.streams.startup`).
        """
        config = config or Config()
        try:
            pool = await asyncpg.create_pool(
                dsn,
                min_size=min(config.pool_size_min, config.pool_size_max),
                max_size=config.pool_size_max,
                max_queries=2**31,  # a connection is never thrown away for its age: its statement cache is worth having
                timeout=config.connect_timeout_ms / 1000,
                command_timeout=config.statement_timeout_ms / 1000,
                statement_cache_size=config.statement_cache_size,
                max_cached_statement_lifetime=0,
                max_cacheable_statement_size=0,  # no limit: the longest is the one that writes
                reset=_keep,
                server_settings=_server_settings(config, mark),
            )
        except (*DRIVER_ERRORS, ValueError) as error:  # ValueError: parts of the DSN that are no numbers
            raise translate(error, connecting=True) from error
        return cls(pool, config, observer)

    async def close(self) -> None:
        """Wait for the connections in use, then close all. Doing so twice is harmless."""
        self._closed = True
        while self._at_hand:
            await self._give_back(self._at_hand.pop())
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def config(self) -> Config:
        """The limits this database was opened with."""
        return self._config

    @property
    def connections(self) -> tuple[int, int, int]:
        """How many connections are open, how many of them are in use, and how many callers wait for one."""
        size = int(self._pool.get_size())
        return size, size - int(self._pool.get_idle_size()) - len(self._at_hand), self._waiting

    def connection(self) -> "Use":
        """A connection in autocommit: each statement is a transaction of its own. To be entered with `async with`."""
        return Use(self)

    @asynccontextmanager
    async def transaction(self, *, isolation: Isolation = "read_committed", readonly: bool = False) -> AsyncIterator[Connection]:
        """A connection inside BEGIN … COMMIT; any exception, cancellation too, rolls back and goes on to the caller.

        Raises `CommitUnknown` if the connection is lost between sending COMMIT and its answer.
        """
        async with self.connection() as conn, begun(conn, isolation=isolation, readonly=readonly):
            yield conn

    async def run(
        self, work: Callable[[Connection], Awaitable[T]], *, isolation: Isolation = "read_committed", readonly: bool = False
    ) -> T:
        """`work` in a transaction, repeated as a whole on a serialization failure, deadlock, lock timeout or lost connection.

        At most `Config.transaction_attempts` times, with a random pause that doubles; then the last error is raised. `work` must
        therefore be free of effects outside the connection. A commit with an unknown outcome is not repeated here
        (`CommitUnknown`): only the caller knows whether the work can be done twice.
        """
        attempts = max(self._config.transaction_attempts, 1)
        for attempt in range(1, attempts):
            try:
                return await self._run_once(work, isolation, readonly=readonly)
            except (DatabaseConflict, DatabaseUnavailable):
                await asyncio.sleep(self._pause(attempt))
        return await self._run_once(work, isolation, readonly=readonly)

    async def _run_once(self, work: Callable[[Connection], Awaitable[T]], isolation: Isolation, *, readonly: bool) -> T:
        async with self.transaction(isolation=isolation, readonly=readonly) as conn:
            return await work(conn)

    def _pause(self, attempt: int) -> float:
        """Seconds to wait after the given failed attempt: random, so that those who met do not meet again."""
        ceiling_ms = min(self._config.retry_delay_ms_first * 2 ** (attempt - 1), self._config.retry_delay_ms_max)
        return random.uniform(0, ceiling_ms) / 1000  # noqa: S311  # no secret

    async def acquire(self) -> Connection:
        """A connection for `Use`. Those at hand come first: the pool takes as long as a small statement to give one out and take it back."""
        if self._closed:
            raise StorageClosed("database")
        while self._at_hand:
            driver = self._at_hand.pop()
            if not _is_closed(driver):
                return Connection(driver, self._observer, self.measures)
        self._waiting += 1
        began = perf_counter()
        try:
            driver = await self._pool.acquire(timeout=self._config.pool_acquire_timeout_ms / 1000)
        except DRIVER_ERRORS as error:
            told = translate(error, connecting=True)
            self.measures.database_errors[type(told).__name__] += 1
            raise told from error
        finally:
            self._waiting -= 1
            self.measures.pool_waits.add(perf_counter() - began)
        return Connection(driver, self._observer, self.measures)

    async def release(self, conn: Connection) -> None:
        """Take it back: to be at hand, or into the pool if somebody waits there, or something of it may still be under way."""
        driver = conn._driver  # noqa: SLF001  # the classes of this module are one thing in parts
        self.measures.statements += conn.statements
        if (
            conn.is_at_rest
            and not (self._waiting or self._closed or _is_closed(driver) or conn.in_transaction)
            and len(self._at_hand) < AT_HAND
        ):
            self._at_hand.append(driver)
        else:
            await self._give_back(driver)

    async def _give_back(self, driver: Any) -> None:
        try:
            await self._pool.release(driver)
        except DRIVER_ERRORS as error:
            if not (isinstance(error, asyncpg.InternalClientError) and _is_closed(driver)):  # closed just now: then the pool has it back
                raise translate(error, closed=True) from error


class Use:
    """A connection for the time of one block."""

    __slots__ = ("_conn", "_database")

    def __init__(self, database: Database) -> None:
        self._database = database

    async def __aenter__(self) -> Connection:
        self._conn = await self._database.acquire()
        return self._conn

    async def __aexit__(self, *_: object) -> None:
        await self._database.release(self._conn)


def _server_settings(config: Config, mark: str) -> dict[str, str]:
    """Settings of every session. Timeouts on the server end what a vanished client left behind.

    Each statement is planned once a session, for any arguments: to plan a sync or a page anew takes longer than to run it, and Postgres would
    do so for ever where it expects a plan for the arguments to be cheaper. tests/queries/test_large_plans.py looks at these plans.
    They may have been made while tables were small, and stay until a table is analysed: so where an order of joins is good at one size only,
    the statement says which (LATERAL with OFFSET 0).
    """
    return {
        "application_name": f"room-storage {config.instance_name} {mark}".rstrip()[:63],
        "jit": "off",
        "plan_cache_mode": "force_generic_plan",
        "lock_timeout": str(config.lock_timeout_ms),
        "statement_timeout": str(config.statement_timeout_ms + 5_000),
        "idle_in_transaction_session_timeout": str(config.statement_timeout_ms + 5_000),
    }


def _is_closed(driver: Any) -> bool:
    """Whether the connection is gone; the pool takes a dead one back from under us, and then refuses to be asked."""
    try:
        return bool(driver.is_closed())
    except asyncpg.InterfaceError:
        return True


@asynccontextmanager
async def begun(conn: Connection, *, isolation: Isolation = "read_committed", readonly: bool = False) -> AsyncIterator[Connection]:
    """A transaction on a connection that is in hand, as `Database.transaction`."""
    try:
        await conn.execute(BEGIN[isolation, readonly])
        yield conn
        await _commit(conn)
    except BaseException:
        await _roll_back(conn)
        raise


async def _keep(_: Any) -> None:
    """The pool's reset on release: nothing, see the module's docstring."""


async def _commit(conn: Connection) -> None:
    """COMMIT, and make sure that it was one: a transaction that an error has aborted answers ROLLBACK."""
    try:
        tag = await conn.execute("COMMIT")
    except DatabaseUnavailable as error:
        raise CommitUnknown(error.reason, sqlstate=error.sqlstate) from error
    if tag != "COMMIT":
        message = "the transaction was rolled back: an error inside it was caught and not passed on"
        raise DatabaseError(message)


async def _roll_back(conn: Connection) -> None:
    """Leave no transaction open, whatever state the connection is in; a connection that cannot be saved is dropped."""
    driver = conn._driver  # noqa: SLF001  # the two classes are one thing in two parts
    if _is_closed(driver):
        return
    try:
        await driver.execute("ROLLBACK", timeout=10)
    except DRIVER_ERRORS:
        driver.terminate()
    except asyncio.CancelledError:
        driver.terminate()
        raise
