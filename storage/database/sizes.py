"""The size of the database and of each table on disk, as Postgres reports it.

`SizeCache` keeps them for metrics. It reads them on request, at most once a minute: a scrape gets
the sizes that are known, and starts a new measurement where they are old. So it never waits for the
database, and a store that nobody scrapes measures nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import StorageError
from storage.observability.counters import Outage

logger: logging.Logger = logging.getLogger(__name__)

SQL_DATABASE: Final[LiteralString] = "SELECT pg_database_size(current_database())"

SQL_TABLES: Final[LiteralString] = """
SELECT
    c.relname::text AS table_name,
    GREATEST(c.reltuples, 0)::bigint AS rows_estimate,
    pg_table_size(c.oid) - COALESCE(pg_total_relation_size(NULLIF(c.reltoastrelid, 0)),
        0) AS table_bytes,
    COALESCE(pg_total_relation_size(NULLIF(c.reltoastrelid, 0)), 0)::bigint AS toast_bytes,
    pg_indexes_size(c.oid) AS index_bytes,
    pg_total_relation_size(c.oid) AS total_bytes
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname = current_schema()
ORDER BY pg_total_relation_size(c.oid) DESC, c.relname
"""

FRESH_SECONDS: Final = 60.0


class TableSize(NamedTuple):
    """One table on disk, in bytes.

    ``rows_estimate`` is Postgres' last estimate; 0 before the first.
    """

    table_name: str
    rows_estimate: int
    table_bytes: int
    toast_bytes: int
    index_bytes: int
    total_bytes: int


class Sizes(NamedTuple):
    """The size of the database, and of each table."""

    database_bytes: int
    tables: list[TableSize]


async def database_bytes(conn: Connection) -> int:
    return int(await conn.fetchval(SQL_DATABASE))


async def table_sizes(conn: Connection) -> list[TableSize]:
    """Return every table, the largest first."""
    return await conn.fetch(SQL_TABLES, row=TableSize)


class SizeCache:
    """The last measured sizes. Create it in the event loop of the database."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._outage = Outage(logger, "the measurement of the tables")
        self._latest: Sizes | None = None
        self._due = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def latest(self) -> Sizes | None:
        """Return the known sizes, None at first; may be called from any thread."""
        if self._clock() >= self._due and not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._measure)
        return self._latest

    async def measured(self) -> None:
        """Wait for the end of the measurement that runs, if one does."""
        await asyncio.sleep(0)  # for a request that was made just now
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Measure nothing from now on."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _measure(self) -> None:
        """Start a measurement, unless another request did."""
        if self._clock() >= self._due and not self._closed:
            self._due = self._clock() + FRESH_SECONDS
            self._task = self._loop.create_task(self._read(), name="table-sizes")

    async def _read(self) -> None:
        try:
            async with self._database.connection() as conn:
                self._latest = Sizes(await database_bytes(conn), await table_sizes(conn))
        except StorageError as error:
            self._outage.failed(f"the tables cannot be measured: {error}")
        else:
            self._outage.recovered()
