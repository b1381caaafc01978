"""The sizes of tables on `/metrics`: right, and measured seldom."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

import storage
from storage import Config, Store
from storage.database import Database
from storage.database.sizes import FRESH_SECONDS, SQL_TABLES, SizeCache, table_sizes
from storage.observability.prometheus import expose
from tests.maintenance.rooms import SERVER
from tests.operating.exposition import scrape
from tests.operating.test_metrics import small_room
from tests.operating.test_outages import Clock
from tests.postgres import no_autovacuum


@dataclass
class Counting:
    """Counts the measurements."""

    found: int = field(default=0)

    def before(self, statement: str) -> None:
        self.found += statement == SQL_TABLES

    def after(self, statement: str, seconds: float) -> None:
        pass


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
async def store(dsn: str, counting: Counting) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER, observer=counting) as opened:
        yield opened


async def test_sizes_are_those_of_postgres(store: Store, counting: Counting) -> None:
    await no_autovacuum(store.database)
    await store.append(small_room().pdus)
    registry = CollectorRegistry()
    expose(store, registry)  # this measures, too
    assert "room_storage_database_bytes" not in scrape(registry), "a scrape waits for nothing"
    await store.sizes.measured()
    now = [scrape(registry) for _ in range(20)][-1]
    async with store.database.connection() as conn:
        tables = await table_sizes(conn)
    assert counting.found == 2, "one for all scrapes, and that of this test"
    assert len(tables) > 30
    for table in tables:
        name = f'table="{table.table_name}"'
        assert [
            now[f'room_storage_table_bytes{{part="{part}",{name}}}']
            for part in ("rows", "large_values", "indexes")
        ] == [table.table_bytes, table.toast_bytes, table.index_bytes]
        assert now[f"room_storage_table_rows{{{name}}}"] == table.rows_estimate
    whole = sum(table.total_bytes for table in tables)
    assert whole < now["room_storage_database_bytes"] < whole + 50_000_000


async def test_they_are_measured_once_a_minute(dsn: str) -> None:
    clock, counting = Clock(), Counting()
    async with await Database.open(dsn, observer=counting) as measured:
        cache = SizeCache(measured, clock)
        for minute in range(1, 4):
            for _ in range(10):
                cache.latest()
                await cache.measured()
            assert counting.found == minute
            clock.now += FRESH_SECONDS
        await cache.close()
        cache.latest()
        await cache.measured()
        assert counting.found == 3


async def test_a_measurement_that_fails_keeps_the_old_sizes(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    config = Config(lock_timeout_ms=50)
    async with (
        await Database.open(dsn, config=config) as measured,
        await Database.open(dsn) as other,
    ):
        cache = SizeCache(measured, clock)
        cache.latest()
        await cache.measured()
        known = cache.latest()
        assert known is not None
        async with other.transaction() as conn:
            await conn.execute("LOCK TABLE rooms IN ACCESS EXCLUSIVE MODE")
            clock.now += FRESH_SECONDS
            assert cache.latest() is known
            await cache.measured()
        assert cache.latest() is known
        assert "the tables cannot be measured" in caplog.text
        clock.now += FRESH_SECONDS
        cache.latest()
        await cache.measured()
        assert cache.latest() is not known
        assert "the measurement of the tables is back" in caplog.text
