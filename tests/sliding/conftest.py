"""Stores of s1.test on a database of the test's own, with a log of every statement."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from tests.queries.conftest import StatementLog


@pytest.fixture
def statements() -> StatementLog:
    return StatementLog()


@pytest.fixture
async def store(dsn: str, statements: StatementLog) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test", observer=statements) as opened:
        yield opened
