"""Stores of s1.test on a database of the test's own, or of the module's that only reads it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import storage
from storage import Store
from storage.streams.position_poller import SQL_MOVE_IDLE, SQL_POSITIONS, SQL_SEQUENCES
from tests.conftest import _fresh_database


class StatementLog:
    """An observer that keeps what was sent, and by which task: a store has tasks of its own.

    Statements that a store sends from time to time are left out.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[object, str]] = []

    def before(self, statement: str) -> None:
        if statement not in (SQL_MOVE_IDLE, SQL_POSITIONS, SQL_SEQUENCES):
            self.sent.append((asyncio.current_task(), statement))

    def after(self, statement: str, seconds: float) -> None:
        """Ignore it."""

    def take(self) -> list[str]:
        """Return this task's statements since the last call, without BEGIN and COMMIT."""
        sent, self.sent = self.sent, []
        own = [statement for task, statement in sent if task is asyncio.current_task()]
        return [statement for statement in own if not statement.startswith(("BEGIN", "COMMIT"))]


@pytest.fixture
def statements() -> StatementLog:
    return StatementLog()


@pytest.fixture
async def store(dsn: str, statements: StatementLog) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test", observer=statements) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_store(server_dsn: str, template_name: str, worker_id: str) -> AsyncIterator[Store]:
    """For tests that read what is filled once: they run in the loop of their module."""
    async with (
        _fresh_database(server_dsn, template_name, f"{worker_id}_module") as dsn,
        storage.open(dsn, server_name="s1.test") as opened,
    ):
        yield opened
