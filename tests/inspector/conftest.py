"""A store on a database of the test's own."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from tests.maintenance.rooms import SERVER


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened
