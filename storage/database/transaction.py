"""BEGIN, COMMIT and ROLLBACK on an open connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal, LiteralString

from storage.database.translate import DRIVER_ERRORS
from storage.errors import CommitUnknown, DatabaseError, DatabaseUnavailable

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
