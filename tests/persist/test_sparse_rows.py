"""Audiences have NULL for false; indexes by chain are full."""

from collections.abc import AsyncIterator
from typing import Final

import pytest

import storage
from storage import Store
from tests.maintenance.rooms import SERVER, deliver, findings
from tests.persist.test_narrow_events import execute
from tests.persist.test_time_order import disorder

SQL_CONTINUED: Final = "SELECT continued FROM audiences ORDER BY audience"
SQL_POSITIONS: Final = """
INSERT INTO auth_chains (event_nid, chain_nid, sequence_number, event_id, state_key)
SELECT number, -number, 2, '', '' FROM generate_series(1, 20000) AS number
"""
SQL_PAGES: Final = """
SELECT pg_relation_size('auth_chains_position_key') / current_setting('block_size')::int
"""


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def continued(store: Store) -> list[bool | None]:
    """Return the flag of all audiences."""
    async with store.database.connection() as conn:
        return await conn.fetchvals(SQL_CONTINUED)


async def test_a_line_that_goes_on_says_so(store: Store) -> None:
    """Changes of members on branches continue lines; the flag is true there, else NULL."""
    _, delivery = disorder(8)
    await deliver(store, delivery)
    assert set(await continued(store)) == {True, None}
    assert await findings(store) == []


async def test_an_index_of_falling_numbers_has_full_pages(store: Store) -> None:
    """One entry takes 28 bytes: 20,000 fit into 69 pages, and into 140 that are half full."""
    await execute(store, SQL_POSITIONS)
    async with store.database.connection() as conn:
        assert await conn.fetchval(SQL_PAGES) < 75
