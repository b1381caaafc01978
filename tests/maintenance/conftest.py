"""A store for the tests of maintenance; a file that wants other settings has a fixture ``config`` of its own."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Config, Store
from tests.maintenance.rooms import SERVER


@pytest.fixture
def config() -> Config:
    return Config()


@pytest.fixture
async def store(dsn: str, config: Config) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER, config=config) as opened:
        yield opened
