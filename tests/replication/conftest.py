"""Processes on one database."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from storage.database.connection import Database
from tests.replication.processes import QUICK, Process

StartProcess = Callable[[str], Awaitable[Process]]


@pytest.fixture
async def quick_database(dsn: str) -> AsyncIterator[Database]:
    async with await Database.open(dsn, config=QUICK) as opened:
        yield opened


@pytest.fixture
async def main(quick_database: Database) -> Process:
    """The process that writes."""
    return await Process.start(quick_database, "main")


@pytest.fixture
async def worker(quick_database: Database, main: Process) -> Process:
    """A process that reads."""
    return await Process.start(quick_database, "worker")
