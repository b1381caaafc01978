"""Which Postgres the tests run on, and DSNs of its databases."""

import importlib.util
import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import pytest

from storage.database import Database
from storage.database.embedded import WHEEL, Binaries
from tests.pausing import pause

DEBIAN_BINARIES: Final = Path("/usr/lib/postgresql/15/bin")


def chosen_binaries() -> Binaries | None:
    """The programs that STORAGE_TEST_POSTGRES asks for; None: those of the wheel."""
    match os.environ.get("STORAGE_TEST_POSTGRES", "embedded"):
        case "embedded":
            return None
        case "debian":
            return Binaries.at(DEBIAN_BINARIES)
        case other:
            message = f"STORAGE_TEST_POSTGRES={other!r}: embedded or debian"
            raise pytest.UsageError(message)


def client_programs() -> Path:
    """The folder of psql, pg_dump and their like, of the Postgres that the tests run on."""
    chosen = chosen_binaries()
    if chosen is not None:
        return chosen.path
    spec = importlib.util.find_spec(WHEEL)
    assert spec is not None
    assert spec.submodule_search_locations
    return max(Path(spec.submodule_search_locations[0]).glob("pginstall*/bin"))


def with_database(dsn: str, name: str) -> str:
    """The DSN of another database on the same server."""
    parts = urlsplit(dsn)
    netloc = parts.netloc or "@"  # urlunsplit would drop the slashes of an empty one
    return urlunsplit((parts.scheme, netloc, f"/{name}", parts.query, ""))


SQL_WAITING: Final = """
SELECT count(DISTINCT waiting.pid)
FROM pg_locks waiting
JOIN pg_locks own USING (pid)
JOIN pg_database d ON d.oid = own.database
WHERE NOT waiting.granted AND d.datname = current_database()
"""
"""How many sessions of this database wait for a lock. Other tests have theirs in `pg_locks`."""


SQL_TABLES: Final = """
SELECT oid::regclass::text
FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
ORDER BY oid
"""


async def no_autovacuum(database: Database) -> None:
    """Turn autovacuum off for all tables of a database, before a test fills them.

    It may run at any time, and change plans and the numbers that a test expects.
    """
    async with database.connection() as conn:
        for table in await conn.fetchvals(SQL_TABLES):
            await conn.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")


async def others_ended(database: Database) -> None:
    """Wait for all transactions that run now, in every database: other tests write, too.

    Rows that were written while another transaction ran count as new
    (`storage.maintenance.expiry`), and are not collected.
    """
    async with database.connection() as conn:
        now = await conn.fetchval("SELECT pg_current_xact_id()::text::bigint")
        while (
            await conn.fetchval("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
            <= now
        ):
            await pause()
