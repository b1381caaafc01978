"""Processes on one database."""

from collections.abc import Awaitable, Callable, Iterator

import pytest

from storage.database.connection import Database
from storage.replication import transport
from tests.replication.processes import QUICK, Process

StartProcess = Callable[[str], Awaitable[Process]]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """The limits of each test; `limit` changes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "LIMITS", QUICK)
        yield


@pytest.fixture
async def main(database: Database) -> Process:
    """The process that writes."""
    return await Process.start(database, "main")


@pytest.fixture
async def worker(database: Database, main: Process) -> Process:
    """A process that reads."""
    return await Process.start(database, "worker")
