"""Results as Arrow batches, for bulk reads: no Python object per row. Needs the extra `spark` (adbc-driver-postgresql, pyarrow).

One connection, one snapshot, no pool, and no event loop: what runs in a Spark executor is synchronous. Statements are the same constants
as everywhere, with the same errors. A result is held whole by the driver below, so large tables are asked for page by page.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, LiteralString

import pyarrow as pa
from adbc_driver_manager import Error, InterfaceError, OperationalError
from adbc_driver_postgresql import dbapi

from storage.database.translate import SQLSTATES
from storage.errors import DatabaseError, DatabaseUnavailable


class ArrowConnection:
    """A connection: a read-only snapshot of `arrow_snapshot`, or the session of `arrow_session`."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def table(self, sql: LiteralString, *args: Any) -> pa.Table:
        """The rows of a statement, column by column."""
        with closing(self._driver.cursor()) as cursor, translated():
            cursor.execute(sql, args or None)
            return cursor.fetch_arrow_table()

    def execute(self, sql: LiteralString) -> None:
        """A statement that answers nothing."""
        with closing(self._driver.cursor()) as cursor, translated():
            cursor.execute(sql)

    def rows(self, sql: LiteralString, *args: Any) -> list[dict[str, Any]]:
        """The rows of a statement, for few of them."""
        found: list[dict[str, Any]] = self.table(sql, *args).to_pylist()
        return found


@contextmanager
def arrow_snapshot(dsn: str) -> Iterator[ArrowConnection]:
    """A connection that sees one state of the database and changes nothing. `DatabaseUnavailable`."""
    with translated(connecting=True):
        driver = dbapi.connect(dsn, autocommit=True)
    with closing(driver):
        with closing(driver.cursor()) as cursor, translated():
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield ArrowConnection(driver)


@contextmanager
def arrow_session(dsn: str) -> Iterator[ArrowConnection]:
    """A connection in autocommit, for the few statements of a driver. `DatabaseUnavailable`."""
    with translated(connecting=True):
        driver = dbapi.connect(dsn, autocommit=True)
    with closing(driver):
        yield ArrowConnection(driver)


@contextmanager
def translated(*, connecting: bool = False) -> Iterator[None]:
    """Our errors for those of the driver."""
    try:
        yield
    except Error as error:
        sqlstate = getattr(error, "sqlstate", None) or ""
        lost = connecting or (not sqlstate and isinstance(error, OperationalError | InterfaceError))
        kind = SQLSTATES.get(sqlstate) or SQLSTATES.get(sqlstate[:2], DatabaseUnavailable if lost else DatabaseError)
        raise kind(str(error), sqlstate=sqlstate) from error
