"""Results as Arrow batches, for bulk reads: no Python object per row.

Needs the extra `spark` (adbc-driver-postgresql, pyarrow).

One connection, one snapshot, no pool, and no event loop: code in a Spark executor is synchronous.
Statements are the same constants as everywhere, with the same errors. The driver holds a whole
result in memory, so large tables are read page by page.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final, LiteralString
from urllib.parse import parse_qs, quote

import pyarrow as pa
from adbc_driver_manager import Error, InterfaceError, OperationalError
from adbc_driver_postgresql import dbapi

from storage.config import Config
from storage.database.dsn import DsnServer
from storage.database.session import (
    PINNED,
    SQL_SESSION,
    UNSUPPORTED,
    SessionRow,
    check_session,
    pinned,
)
from storage.database.translate import SQLSTATES
from storage.errors import DatabaseError, DatabaseUnavailable, InputError

PREFIX: Final = "[libpq] Failed to connect: "
DIRECT: Final = (
    "a pooler such as PgBouncer drops the settings of a session: give Spark the address of Postgres"
)

LIBPQ: Final = {
    "client_encoding": "UTF8",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
"""Settings that asyncpg or `Config` sets in other sessions.

A read for Spark has no time limit.
"""


class ArrowConnection:
    """A connection: a read-only snapshot of `arrow_snapshot`, or the session of `arrow_session`."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def table(self, sql: LiteralString, *args: Any) -> pa.Table:
        """Return the rows of a statement, column by column."""
        with closing(self._driver.cursor()) as cursor, translated():
            cursor.execute(sql, args or None)
            return cursor.fetch_arrow_table()

    def execute(self, sql: LiteralString) -> None:
        """Run a statement without a result."""
        with closing(self._driver.cursor()) as cursor, translated():
            cursor.execute(sql)

    def rows(self, sql: LiteralString, *args: Any) -> list[dict[str, Any]]:
        """Return the rows of a statement as dicts, for few of them."""
        rows: list[dict[str, Any]] = self.table(sql, *args).to_pylist()
        return rows


@contextmanager
def arrow_snapshot(
    dsn: str, *, foreign: bool = False, config: Config | None = None
) -> Iterator[ArrowConnection]:
    """Open a connection with one snapshot of the database that changes nothing.

    Raise `DatabaseUnavailable`, and otherwise as `storage.database.session`.

    ``foreign`` means that it is not a database of this engine: the session keeps its search path,
    and any encoding and setting are accepted. ``config`` is that of the driver, for an executor
    whose environment may differ; default: from the environment.
    """
    with _connected(dsn, foreign=foreign, config=config) as conn:
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield conn


@contextmanager
def arrow_session(dsn: str, *, config: Config | None = None) -> Iterator[ArrowConnection]:
    """Open a connection in autocommit, for the few statements of a driver.

    Raise the errors of `arrow_snapshot`.
    """
    with _connected(dsn, config=config) as conn:
        yield conn


@contextmanager
def _connected(
    dsn: str, *, foreign: bool = False, config: Config | None = None
) -> Iterator[ArrowConnection]:
    """Connect in autocommit, with pinned settings."""
    settings = PINNED if foreign else pinned(config or Config.from_env())
    server = DsnServer(dsn)
    with translated(server):
        driver = dbapi.connect(with_settings(dsn, {**settings, **LIBPQ}), autocommit=True)
    with closing(driver):
        conn = ArrowConnection(driver)
        if not foreign:
            row = SessionRow(**conn.rows(SQL_SESSION)[0])
            check_session(row)
            if not row.is_pinned:
                raise InputError(f"{server.address}: {DIRECT}")
        yield conn


def with_settings(dsn: str, settings: Mapping[str, str]) -> str:
    """Return the DSN with settings for the start of the session.

    They come after those in the DSN itself or in the environment.
    """
    inherited = parse_qs(dsn.partition("?")[2]).get("options") or [os.environ.get("PGOPTIONS", "")]
    options = [*inherited, *(f"-c {name}={_escaped(value)}" for name, value in settings.items())]
    return f"{dsn}{'&' if '?' in dsn else '?'}options={quote(' '.join(options).strip(), safe='')}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


@contextmanager
def translated(server: DsnServer | None = None) -> Iterator[None]:
    """Raise our errors instead of the driver's. ``server``: while a connection is opened."""
    try:
        yield
    except Error as error:
        sqlstate = getattr(error, "sqlstate", None) or ""
        lost = server or (not sqlstate and isinstance(error, OperationalError | InterfaceError))
        kind = SQLSTATES.get(sqlstate) or SQLSTATES.get(
            sqlstate[:2], DatabaseUnavailable if lost else DatabaseError
        )
        if server is None:
            raise kind(str(error), sqlstate=sqlstate) from error
        reason = server.hide(_sentence(str(error)))
        if UNSUPPORTED in reason:
            raise InputError(f"{server.address}: {DIRECT}") from None
        raise kind(f"cannot connect to Postgres at {server.address}: {reason}") from error


def _sentence(text: str) -> str:
    """Return an error of libpq without its hints."""
    lines = text.rpartition(PREFIX)[2].splitlines()
    return "; ".join(line for line in lines if line and not line.startswith("\t"))
