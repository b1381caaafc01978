"""Two or three homeservers, each with a database of its own."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.conftest import _fresh_database
from tests.federation.hanging import limits_are_noted  # noqa: F401  # a fixture for all tests here
from tests.federation.peers import Homeserver, start


@pytest.fixture
async def third_dsn(server_dsn: str, template_name: str, worker_id: str) -> AsyncIterator[str]:
    async with _fresh_database(server_dsn, template_name, worker_id) as fresh:
        yield fresh


@pytest.fixture
async def two(dsn: str, another_dsn: str) -> AsyncIterator[list[Homeserver]]:
    async with AsyncExitStack() as stack:
        yield await start(stack, [dsn, another_dsn])


@pytest.fixture
async def three(dsn: str, another_dsn: str, third_dsn: str) -> AsyncIterator[list[Homeserver]]:
    async with AsyncExitStack() as stack:
        yield await start(stack, [dsn, another_dsn, third_dsn])
