"""Statements that sessions prepare and plan before a caller needs them.

Postgres keeps plans per session, and to plan a page or a sync takes ten times as long as to run it.
So the first call on a new session would be slow. A module whose statement should not be slow then
declares it:

    prepare_ahead(SQL_PAGE)

A store prepares all declared statements on its idle sessions, one at a time, while it opens and
afterwards. A session goes back to the pool after each statement, so that a caller waits for one
statement at most. EXPLAIN makes the plan: unlike a run it needs no arguments and changes nothing.
It keeps the plan because sessions force generic plans (`storage.database.session`).

A pooler in session mode keeps this as it is: the server session belongs to one client session.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, LiteralString

from storage.database.pool import Pool
from storage.database.session import Session
from storage.database.translate import CONNECTING_ERRORS, DRIVER_ERRORS
from storage.errors import StorageError

logger: logging.Logger = logging.getLogger(__name__)

STEP_SECONDS_MAX: Final = 3.0
"""Longest time of one step: it may wait for a lock of a migration, or for a processor."""

SQL_EXPLAIN_PREPARED: Final[LiteralString] = """
SELECT format('EXPLAIN (COSTS OFF) EXECUTE %I%s', name,
    '(' || NULLIF(array_to_string(
        array_fill('NULL'::text, ARRAY[cardinality(parameter_types)]), ', '), '') || ')')
FROM pg_prepared_statements
WHERE statement = $1::text
"""

_reads: Final[dict[LiteralString, None]] = {}
_writes: Final[dict[LiteralString, None]] = {}


def prepare_ahead(*statements: LiteralString, writes: bool = False) -> None:
    """Declare statements that a store prepares on all of its sessions. Call it at module level.

    ``writes``: an append needs them, so a store that only reads leaves them out.
    """
    (_writes if writes else _reads).update(dict.fromkeys(statements))


def declared(*, read_only: bool = False) -> tuple[LiteralString, ...]:
    """Return the statements that the imported modules have declared, reads first."""
    return (*_reads, *(() if read_only else _writes))


class PreparedAhead:
    """Prepares the declared statements on the sessions of one pool."""

    def __init__(self, pool: Pool, *, read_only: bool) -> None:
        self._pool = pool
        self._read_only = read_only
        self._statements: Sequence[LiteralString] = ()
        self._is_done = asyncio.Event()

    async def run(self) -> None:
        """Prepare until cancelled, also on sessions that are opened later.

        First open a session besides the one that an opening store uses.
        """
        self._statements = declared(read_only=self._read_only)
        try:
            await self._pool.add_idle()
        except (*CONNECTING_ERRORS, StorageError) as error:
            logger.warning("no session to prepare statements on: %s", error)
        while True:
            self._pool.returned.clear()
            session = self._pool.lend_unprepared(len(self._statements))
            if session is None:
                if not self._pool.lacks(len(self._statements)):
                    self._is_done.set()
                await self._pool.returned.wait()
            else:
                self._is_done.clear()
                await self._prepare_next(session)

    async def done(self) -> None:
        """Wait until no session lacks a statement. Needs a running `run`."""
        if self._pool.lacks(len(self._statements)):  # `run` has not seen a new session yet
            self._is_done.clear()
        await self._is_done.wait()

    async def _prepare_next(self, session: Session) -> None:
        """Prepare one statement on a lent session, and give it back.

        A statement that cannot be prepared is left to its caller, who gets the error.
        """
        sql = self._statements[session.prepared]
        session.prepared += 1
        try:
            await _prepare(session.driver, sql)
        except (*DRIVER_ERRORS, AttributeError) as error:
            if isinstance(error, AttributeError) and not session.driver.is_closed():
                await self._pool.settle(session)
                raise  # of a closed session, the driver has removed an attribute that it uses
            beginning = " ".join(sql.split())[:60]
            reason = str(error) or type(error).__name__  # a timeout has no text
            logger.warning("a statement cannot be prepared ahead: %s: %s …", reason, beginning)
            await self._pool.settle(session)
        except BaseException:
            await self._pool.settle(session)
            raise
        else:
            self._pool.give_back(session)


async def _prepare(driver: Any, sql: LiteralString) -> None:
    """Prepare and plan a statement where the driver looks for it.

    A driver with too small a cache has closed the statement before it can be planned.
    """
    await driver.executemany(sql, (), timeout=STEP_SECONDS_MAX)  # runs it for no arguments
    explain = await driver.fetchval(SQL_EXPLAIN_PREPARED, sql, timeout=STEP_SECONDS_MAX)
    if explain is not None:
        await driver.execute(explain, timeout=STEP_SECONDS_MAX)
