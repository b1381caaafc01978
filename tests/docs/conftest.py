"""A database for each page: a copy of one that has a room, or an empty one."""

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.docs.page import begins_empty
from tests.docs.quick_command import quick_command
from tests.docs.rooms import fill
from tests.postgres import with_database

_numbers = itertools.count(1)


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def furnished(server_dsn: str, template_name: str, worker_id: str) -> Iterator[str]:
    """Return the name of a database with the room that pages use."""
    name = f"storage_docs_{os.getpid()}_{worker_id}"
    asyncio.run(_furnish(server_dsn, template_name, name))
    yield name
    asyncio.run(_execute(server_dsn, f"DROP DATABASE {name} WITH (FORCE)"))


async def _furnish(server_dsn: str, template: str, name: str) -> None:
    await _execute(server_dsn, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")
    dsn = with_database(server_dsn, name)
    await fill(dsn)
    await _execute(dsn, "UPDATE deployment SET incarnation = NULL")  # a copy is no restored backup


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    """Return the folder of `room-storage`, for the path of a page."""
    with tempfile.TemporaryDirectory(prefix="docs-") as folder, quick_command(Path(folder)) as path:
        yield path


@pytest.fixture
async def page_dsn(
    server_dsn: str, template_name: str, furnished: str, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """A database of the page's own."""
    is_empty = begins_empty(request.node.callspec.params["page"])
    name = f"{furnished}_{next(_numbers)}"
    template = template_name if is_empty else furnished
    await _execute(server_dsn, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")
    yield with_database(server_dsn, name)
    await _execute(server_dsn, f"DROP DATABASE {name} WITH (FORCE)")
