"""Events have two forms: the one of earlier releases, and one that an index leaves out."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import pytest

import storage
from storage import Store
from storage.database.migrate import INLINE_LINKS_REVISION, NARROW_EVENTS_REVISION
from storage.persist.model.rows import NO_TIME
from storage.pipeline.rebuilding import Rebuilder
from tests.maintenance.rooms import SERVER, deliver
from tests.persist.test_narrow_rows import alembic
from tests.persist.test_time_order import check, disorder, reached

ADMIN: Final = "@user1:s1.test"
SQL_REVISION: Final = "UPDATE schema_compatibility SET code_revision = $1::text"


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def execute(store: Store, sql: str, *args: object) -> None:
    async with store.database.connection() as conn:
        await conn.execute(sql, *args)


async def test_an_old_database_goes_on(store: Store, dsn: str) -> None:
    """Before the post step rows have the old form, and they keep it afterwards."""
    room, delivery = disorder(8)
    half = len(delivery.events) // 2
    await execute(store, SQL_REVISION, INLINE_LINKS_REVISION)
    await deliver(store, replace(delivery, events=delivery.events[:half]))
    assert set(await reached(store)) == {NO_TIME}
    await check(store, room)
    await execute(store, SQL_REVISION, NARROW_EVENTS_REVISION)
    await deliver(store, replace(delivery, events=delivery.events[half:]))
    new = await reached(store)
    assert None in new
    await check(store, room)
    async with Rebuilder.opened(dsn, SERVER) as rebuilder:
        assert (await rebuilder.rebuild(room.room_id)).events == 0
    assert await reached(store) == new


async def test_the_old_form_is_written_back(dsn: str) -> None:
    """After a downgrade all events are in the index, and writers may leave out new ones again."""
    room, delivery = disorder(8)
    half = len(delivery.events) // 2
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, replace(delivery, events=delivery.events[:half]))
        assert len(set(await reached(store))) > 3
    alembic(dsn, "downgrade", "0051")
    async with storage.open(dsn, server_name=SERVER) as store:
        assert set(await reached(store)) == {NO_TIME}
    alembic(dsn, "upgrade", "head")
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, replace(delivery, events=delivery.events[half:]))
        assert None in await reached(store)
        await check(store, room)
