"""Audiences have NULL for false, once every process can read it; indexes by chain are full."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import pytest

import storage
from storage import Store
from storage.database.migrate import NARROW_EVENTS_REVISION, SPARSE_REVISION
from storage.pipeline.rebuilding import Rebuilder
from tests.maintenance.rooms import SERVER, deliver, findings
from tests.persist.test_narrow_events import SQL_REVISION, execute
from tests.persist.test_narrow_rows import alembic
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


async def test_an_old_database_goes_on(store: Store, dsn: str) -> None:
    """Before the step rows have the old form, and both forms are read after it."""
    room, delivery = disorder(8)
    half = len(delivery.events) // 2
    await execute(store, SQL_REVISION, NARROW_EVENTS_REVISION)
    await deliver(store, replace(delivery, events=delivery.events[:half]))
    old = await continued(store)
    assert None not in old
    assert False in old
    await execute(store, SQL_REVISION, SPARSE_REVISION)
    await deliver(store, replace(delivery, events=delivery.events[half:]))
    assert None in await continued(store)
    assert await findings(store) == []
    async with Rebuilder.opened(dsn, SERVER) as rebuilder:
        await rebuilder.rebuild(room.room_id)
    assert False not in await continued(store)
    assert await findings(store) == []


async def test_a_line_that_goes_on_says_so_in_both_forms(store: Store) -> None:
    """Changes of members on branches continue lines; the flag is true there, else NULL."""
    _, delivery = disorder(8)
    await deliver(store, delivery)
    assert set(await continued(store)) == {True, None}
    assert await findings(store) == []


async def test_the_old_form_is_written_back(dsn: str) -> None:
    """A downgrade leaves no NULL, and an upgrade after it writes NULL again."""
    _, delivery = disorder(8)
    half = len(delivery.events) // 2
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, replace(delivery, events=delivery.events[:half]))
        assert None in await continued(store)
    alembic(dsn, "downgrade", NARROW_EVENTS_REVISION)
    async with storage.open(dsn, server_name=SERVER) as store:
        assert None not in await continued(store)
    alembic(dsn, "upgrade", "head")
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, replace(delivery, events=delivery.events[half:]))
        assert None in await continued(store)
        assert await findings(store) == []


async def test_an_index_of_falling_numbers_has_full_pages(store: Store) -> None:
    """One entry takes 28 bytes: 20,000 fit into 69 pages, and into 140 that are half full."""
    await execute(store, SQL_POSITIONS)
    async with store.database.connection() as conn:
        assert await conn.fetchval(SQL_PAGES) < 75
