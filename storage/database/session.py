"""A session with Postgres, with every setting pinned that could change a result or lose data.

A setting may come from the server, the role or the database (`ALTER SYSTEM`, `ALTER ROLE`, `ALTER
DATABASE … SET`). Settings that a session sends when it starts outrank them all. So those in PINNED
and `pinned` are sent along, which costs nothing. Some settings cannot be sent along: not every
Postgres has them, or only a superuser may set them. SQL_SESSION sets those where it may, and
returns those that are still wrong.

tests/database/test_settings.py lists every setting that a session may change, and why the others
need not be pinned.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, LiteralString, NamedTuple

import asyncpg

from storage.config import Config
from storage.database.archived_bytes import ArchiveAccess, ArchiveLimits, open_access
from storage.database.dsn import DsnServer
from storage.errors import DatabaseError, DatabaseReplaced, InputError

ENCODING: Final = "UTF8"

UNSUPPORTED: Final = "unsupported startup parameter"
"""The beginning of PgBouncer's error for a setting at the start of a session."""

STATEMENT_POOLING: Final = "not allowed in statement pooling mode"
"""The end of PgBouncer's error for BEGIN with pool_mode = statement."""

POOLING: Final = (
    "a pooler such as PgBouncer gives each transaction another server process, which loses the "
    "settings of a session: set pool_mode = session for this database, or connect to Postgres "
    "directly"
)
POOLING_TRIALS: Final = 12

# Prepared statements that a session keeps. The engine has fewer, so each is planned once.
STATEMENTS_MAX: Final = 500
"""With three processes and other clients, one trial in five shows nothing."""
OTHER_BACKEND: Final = (
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.DuplicatePreparedStatementError,
)
"""Errors of a prepared statement that was sent to another process than before."""

PLANNER: Final[Mapping[str, str]] = {
    # Statements read rows through indexes, in order, up to a limit. Statistics decide whether
    # Postgres expects other ways to be cheaper, and these cost more with each event of a room:
    # a bitmap (it reads all events of the room, then sorts them), a sequential scan (all rows), and
    # a merge join (all rows of two indexes). So these are off. Two consequences for a statement:
    # - One that needs block ranges (BRIN) sets enable_bitmapscan in its transaction.
    # - `event_id = ANY(…)` finds no index, because a hash index has no other scan for it. Join
    #   `unnest` LATERAL (with OFFSET 0), which looks for each id.
    "enable_bitmapscan": "off",
    "enable_seqscan": "off",
    "enable_mergejoin": "off",
    # The other ways stay on. Hash joins are for lists in memory. Where one side is a table, a
    # statement says LATERAL with OFFSET 0: this fixes the order, and looks up each row.
    "enable_hashagg": "on",
    "enable_hashjoin": "on",
    "enable_incremental_sort": "on",
    "enable_indexonlyscan": "on",
    "enable_indexscan": "on",
    "enable_material": "on",
    "enable_memoize": "on",
    "enable_nestloop": "on",
    "enable_sort": "on",
    "enable_tidscan": "on",
    # A row that is read costs more than everything else. So the plan with the fewest rows is the
    # cheapest: a lookup for each row of a list, not a scan of the table that the list is joined to.
    # An operator's costs describe the disks, and are meant for statements of another kind.
    "cpu_tuple_cost": "1",
    "cpu_index_tuple_cost": "0.5",
    "cpu_operator_cost": "0.0025",
    "seq_page_cost": "0.1",
    "random_page_cost": "0.1",
    "effective_cache_size": "4GB",
    # Joins are ordered in one way in every session, and no process is started for a page.
    "from_collapse_limit": "8",
    "join_collapse_limit": "8",
    "geqo": "off",
    "max_parallel_workers_per_gather": "0",
}
"""The settings of the planner: the same plan everywhere, whatever an operator sets."""

PINNED: Final[Mapping[str, str]] = {
    # The defaults of a transaction.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # The syntax of statements.
    "standard_conforming_strings": "on",
    "backslash_quote": "safe_encoding",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "quote_all_identifiers": "off",
    "client_min_messages": "notice",
    # The text form of values.
    "bytea_output": "hex",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "lc_numeric": "C",
    "lc_time": "C",
    "xmlbinary": "base64",
    "xmloption": "content",
    # Row filters: raise an error where a policy would hide rows.
    "row_security": "off",
    "gin_fuzzy_search_limit": "0",
    # The end of a session: only the timeouts of Config apply.
    "exit_on_error": "off",
    "idle_session_timeout": "0",
    # Each statement is planned once per session, for any arguments. To plan a sync or a page again
    # takes longer than to run it, and Postgres would do so forever where it expects a plan for the
    # arguments to be cheaper. Plans may have been made while tables were small, and stay until a
    # table is analysed. So no plan may depend on statistics: see PLANNER, and
    # tests/plans/test_reads.py.
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    **PLANNER,
}
"""Settings that are the same in every session."""

SQL_SESSION: Final[LiteralString] = """
WITH pinned AS MATERIALIZED (
    SELECT p.name, p.wanted,
        CASE
            -- this Postgres has no such setting
            WHEN current_setting(p.name, true) IS NULL THEN p.wanted
            WHEN p.is_free OR has_parameter_privilege(p.name, 'SET') THEN set_config(p.name,
                p.wanted, false)
            ELSE current_setting(p.name)
        END AS found
    FROM (
        VALUES ('transaction_timeout', '0', true), ('session_replication_role', 'origin', false),
            ('zero_damaged_pages', 'off', false),
            ('ignore_checksum_failure', 'off', false)
    ) AS p (name, wanted, is_free)
)
SELECT current_database()::text AS database_name, current_setting('server_encoding') AS encoding,
    pg_backend_pid() AS backend_pid,
    current_setting('plan_cache_mode') = 'force_generic_plan' AS is_pinned,
    ARRAY(SELECT name || ' = ' || found FROM pinned WHERE found <> wanted) AS wrong,
    CASE  -- a standby has no place where it writes
        WHEN NOT pg_is_in_recovery() THEN format('%s.%s',
            (SELECT system_identifier FROM pg_control_system()),
            left(pg_walfile_name(pg_current_wal_lsn()), 8))
    END AS cluster
"""


SQL_SET: Final[LiteralString] = """
SELECT set_config(s.name, s.value, false)
FROM unnest($1::text[], $2::text[]) AS s (name, value)
"""

SQL_BACKEND: Final[LiteralString] = "SELECT pg_backend_pid()"


class SessionRow(NamedTuple):
    """The properties of a session.

    ``is_pinned``: the settings of its start have arrived; one that nobody else sets shows it.
    ``wrong``: settings that it may not correct. ``cluster``: the cluster and its timeline, None for
    a standby.
    """

    database_name: str
    encoding: str
    backend_pid: int
    is_pinned: bool
    wrong: list[str]
    cluster: str | None


class Session:
    """One connection of the driver, from its start to its end."""

    __slots__ = (
        "archive",
        "backend_pid",
        "cluster",
        "driver",
        "idle_since",
        "is_over",
        "is_read_only",
        "prepared",
        "server",
    )

    def __init__(
        self,
        driver: Any,
        cluster: str | None = None,
        backend_pid: int | None = None,
        *,
        is_read_only: bool = False,
        limits: ArchiveLimits | None = None,
    ) -> None:
        self.driver: Any = driver
        self.backend_pid: int | None = backend_pid
        """The process of the server; a pooler gives the driver another number."""
        self.cluster: str | None = cluster
        """The cluster and its timeline; None for a standby."""
        self.is_read_only: bool = is_read_only
        """Whether Postgres refuses every write of the session."""
        self.server: object = None
        """A note of the user of the pool about the server."""
        self.archive: ArchiveAccess = open_access(limits)
        self.prepared: int = 0
        """How many of the declared statements are prepared (`storage.database.prepared`)."""
        self.idle_since: float = 0.0
        self.is_over: bool = False
        """It was ended on purpose: ignore a result that still arrived over it."""

    def end(self) -> None:
        """End it, also during a statement."""
        self.is_over = True
        self.driver.terminate()


def pinned(config: Config) -> dict[str, str]:
    schema = config.database_schema.replace('"', '""')
    return {**PINNED, "search_path": f'"{schema}"', "synchronous_commit": config.synchronous_commit}


def check_session(row: SessionRow) -> None:
    """Check a new session.

    Raise `InputError` if the database cannot store every event, `DatabaseError` for a setting that
    only a superuser may change.
    """
    if row.encoding != ENCODING:
        raise InputError(
            f"the database {row.database_name} has the encoding {row.encoding}, "
            f"and events need UTF8: create one with CREATE DATABASE … ENCODING "
            f"'UTF8' TEMPLATE template0, and give its DSN"
        )
    if row.wrong:
        raise DatabaseError(
            f"the server, the database or the role has {', '.join(row.wrong)}, "
            f"with which data can be lost: reset it as a superuser "
            f"(ALTER SYSTEM, ALTER DATABASE or ALTER ROLE … RESET)"
        )


class OpenDriver(NamedTuple):
    """A connection of the driver, and its session."""

    driver: Any
    row: SessionRow
    is_pooled: bool
    """Whether a pooler, such as PgBouncer, stands before the server."""


async def open_driver(server: DsnServer, settings: Mapping[str, str], **options: Any) -> OpenDriver:
    """Open a session with these settings, and check it.

    A pooler refuses or ignores most settings at the start of a session, so they are set after it.
    Raise errors of the driver, and those of `check_session`.
    """
    try:
        driver = await asyncpg.connect(server.dsn, server_settings=dict(settings), **options)
    except asyncpg.ProtocolViolationError as error:
        if UNSUPPORTED not in str(error):
            raise
        name = {"application_name": settings.get("application_name", "room-storage")}
        driver = await asyncpg.connect(server.dsn, server_settings=name, **options)
    try:
        row = SessionRow._make(await driver.fetchrow(SQL_SESSION))  # NamedTuple's public method
        check_session(row)
        is_pooled = not row.is_pinned or row.backend_pid != driver.get_server_pid()
        if is_pooled:
            await driver.execute(SQL_SET, list(settings), list(settings.values()))
    except BaseException as error:
        driver.terminate()
        if isinstance(error, OTHER_BACKEND):
            raise InputError(POOLING) from None
        raise
    return OpenDriver(driver, row, is_pooled)


async def check_pooling(server: DsnServer, opened: OpenDriver, **options: Any) -> None:
    """Raise `InputError` if a pooler lends a server process for one transaction only.

    Then a session would lose its settings, locks and prepared statements. Two sessions of which one
    is idle show it: they share a process, or the idle one returns with another one. A pooler with
    other clients may hide that once, so it is tried several times.
    """
    if not opened.is_pooled:
        return
    other = await asyncpg.connect(server.dsn, **options)
    try:
        for _ in range(POOLING_TRIALS):
            async with other.transaction():
                pid = await other.fetchval(SQL_BACKEND)
            again = await opened.driver.fetchval(SQL_BACKEND)
            if pid == opened.row.backend_pid or again != opened.row.backend_pid:
                raise InputError(POOLING)
    except OTHER_BACKEND:
        raise InputError(POOLING) from None
    except asyncpg.ConnectionDoesNotExistError as error:
        if STATEMENT_POOLING not in str(error):
            raise
        raise InputError(POOLING) from None
    finally:
        other.terminate()


class Connector:
    """Opens the sessions of one `Database`."""

    __slots__ = ("_config", "_is_checked", "_limits", "_mark", "read_only", "server")

    def __init__(
        self, server: DsnServer, config: Config, mark: str, *, read_only: bool = False
    ) -> None:
        self.server: DsnServer = server
        self._config = config
        self._mark = mark
        self.read_only: bool = read_only
        self._is_checked = False
        self._limits = ArchiveLimits(config)

    async def __call__(self) -> Session:
        """Open a session for any use.

        Raise errors of the driver, and those of `check_session` and `check_pooling`.
        """
        timeout = self._config.connect_timeout_ms / 1000
        opened = await open_driver(
            self.server,
            _server_settings(self._config, self._mark, read_only=self.read_only),
            timeout=timeout,
            command_timeout=self._config.statement_timeout_ms / 1000,
            statement_cache_size=STATEMENTS_MAX,
            max_cached_statement_lifetime=0,
            max_cacheable_statement_size=0,  # no limit: the write statement is the longest
        )
        try:
            if not self._is_checked:
                await check_pooling(self.server, opened, timeout=timeout, command_timeout=timeout)
                self._is_checked = True
        except BaseException:
            opened.driver.terminate()
            raise
        row = opened.row
        return Session(
            opened.driver,
            row.cluster,
            row.backend_pid,
            is_read_only=self.read_only,
            limits=self._limits,
        )


def migration_settings(database_schema: str) -> dict[str, str]:
    """Return the settings of the session of a migration.

    Its steps set their own lock timeouts, and have no time limit.
    """
    timeouts = ("statement_timeout", "idle_in_transaction_session_timeout")
    return {**pinned(Config(database_schema=database_schema)), **dict.fromkeys(timeouts, "0")}


def _server_settings(config: Config, mark: str, *, read_only: bool = False) -> dict[str, str]:
    """Return the settings of every session.

    Timeouts on the server end the work of vanished clients.
    """
    return {
        **pinned(config),
        **({"default_transaction_read_only": "on"} if read_only else {}),
        "application_name": f"room-storage {config.instance_name} {mark}".rstrip()[:63],
        "lock_timeout": str(config.lock_timeout_ms),
        "statement_timeout": str(config.statement_timeout_ms + 5_000),
        "idle_in_transaction_session_timeout": str(config.statement_timeout_ms + 5_000),
    }


# --------------------------------------------------------------------------------------------------
# The check that a pool's sessions lead to the database that was entered, not to a replacement.
#
# A promoted standby, or a restored backup, may lack the last commits. The memory of a process then
# belongs to the old database. So each new session is checked. If the check fails, nobody gets a
# session, to write or to read, until the user of the pool has entered again.
#
#     current   check fails     -> replaced    all sessions end, and callers wait
#     replaced  `enter_again`   -> current     callers go on
#
# `connection_generation` counts these steps. A plan or request of one is not valid in the next.

REPLACED: Final = (
    "the database was restored, or a standby took over, and this process has not entered it again"
)


class Guard:
    """The state of one pool."""

    def __init__(self) -> None:
        self.connection_generation: int = 0
        self.reason: str = ""
        """Why the database could not be entered again so far."""
        self._current = asyncio.Event()
        self._current.set()
        self._replaced = asyncio.Event()

    @property
    def is_current(self) -> bool:
        """Return whether sessions may be lent out."""
        return self._current.is_set()

    def replaced(self) -> None:
        """Lend out no session from now on."""
        if self._current.is_set():
            self.connection_generation += 1
            self._current.clear()
            self._replaced.set()

    def enter_again(self) -> None:
        """Lend out sessions again."""
        self.connection_generation += 1
        self.reason = ""
        self._replaced.clear()
        self._current.set()

    def close(self) -> None:
        """Release all waiting callers."""
        self._current.set()

    async def until_replaced(self) -> None:
        await self._replaced.wait()

    async def until_current(self, seconds: float) -> None:
        """Wait until the database is entered again. Raise `DatabaseReplaced` on a timeout."""
        try:
            async with asyncio.timeout(seconds):
                await self._current.wait()
        except TimeoutError:
            raise self.error() from None

    def error(self) -> DatabaseReplaced:
        """Return the error for callers that cannot wait."""
        return DatabaseReplaced(f"{REPLACED}: {self.reason}" if self.reason else REPLACED)
