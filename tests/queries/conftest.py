"""Stores of s1.test on a database of the test's own, with a log of every statement."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store


class StatementLog:
    """An observer that keeps what was sent, and by which task: a store has tasks of its own."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, str]] = []

    def before(self, statement: str) -> None:
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
