"""Stores of s1.test on a database of the test's own, told of every statement."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store


class Statements:
    """An observer that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def before(self, statement: str) -> None:
        self.sent.append(statement)

    def after(self, statement: str, seconds: float) -> None:
        """Not of interest."""

    def take(self) -> list[str]:
        """What was sent since the last time, without BEGIN and COMMIT."""
        sent, self.sent = self.sent, []
        return [statement for statement in sent if not statement.startswith(("BEGIN", "COMMIT"))]


@pytest.fixture
def statements() -> Statements:
    return Statements()


@pytest.fixture
async def store(dsn: str, statements: Statements) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test", observer=statements) as opened:
        yield opened
