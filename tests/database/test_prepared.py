"""Statements that sessions prepare before their first use.

A page, a sync and an append on such a session prepare nothing more. No caller waits for more than
one of them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import asyncpg
import pytest

import storage
from storage import Store
from storage.config import Config
from storage.database import Database, session
from storage.database import prepared as ahead
from storage.database.prepared import declared
from storage.queries.unread import SQL_UNREAD
from storage.store.open import running
from storage.streams import position_poller
from storage.testing import RoomBuilder
from tests.pausing import pause
from tests.postgres import SQL_WAITING

ONE = Config(pool_size_max=1)
SERVER = "s1.test"
SQL_PREPARED = "SELECT statement, generic_plans FROM pg_prepared_statements"
OF_OTHERS = {
    SQL_PREPARED,
    *(getattr(position_poller, name) for name in dir(position_poller) if name.startswith("SQL_")),
}
"""Statements that the test or a background task prepares meanwhile."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer for one step than a server in use."""
    monkeypatch.setattr(ahead, "STEP_SECONDS_MAX", 60.0)


async def prepared(database: Database) -> dict[str, int]:
    """The prepared statements of the only session, with how often each used its generic plan."""
    async with database.connection() as conn:
        return dict(await conn._driver.fetch(SQL_PREPARED))


@asynccontextmanager
async def preparing(dsn: str, *, read_only: bool = False) -> AsyncIterator[Database]:
    """A database of one session that prepares, and has lent it for the first statement."""
    async with (
        await Database.open(dsn, config=ONE, read_only=read_only) as database,
        running(database.prepared.run()),
        asyncio.timeout(60),
    ):
        await asyncio.sleep(0)
        assert database.connections == (1, 1, 0)
        yield database


def started(room: RoomBuilder) -> RoomBuilder:
    room.start(room.user(1))
    return room


async def use(store: Store, room: RoomBuilder) -> None:
    """Sync, page and append as a homeserver does all the time."""
    alice = room.user(1)
    first = await store.sync(alice, device_id="PHONE")
    await store.append([room.message(alice).pdu])
    await store.append([room.message(alice).pdu for _ in range(2)])
    for number in (2, 3):
        await store.append([room.join(room.user(number)).pdu])
    await store.append([room.join(room.user(number)).pdu for number in (4, 5)])
    assert (await store.sync(alice, since=first.next_batch, device_id="PHONE")).join
    third = await store.sync(alice, since=first.next_batch)
    await store.append([room.message(alice).pdu])
    assert (await store.sync(alice, since=third.next_batch)).join  # rooms are in memory
    assert (await store.messages(room.room_id, alice)).chunk
    assert (await store.messages(room.room_id, alice, direction="f")).chunk


async def test_a_page_a_sync_and_an_append_prepare_nothing_more(dsn: str) -> None:
    room = started(RoomBuilder("11", seed=1, checked=False))
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
    async with storage.open(dsn, server_name=SERVER, config=ONE) as store:
        async with asyncio.timeout(60):
            await store.database.prepared.done()
        before = await prepared(store.database)
        await use(store, room)
        after = await prepared(store.database)
    assert {sql for sql in declared() if before.get(sql) == 1} == set(declared())
    assert after.keys() - before.keys() - OF_OTHERS == set()
    # each is declared because it is used
    assert [sql for sql in declared() if after[sql] == 1] == []


async def test_a_caller_waits_for_one_statement_at_most(dsn: str) -> None:
    async with preparing(dsn) as database:
        for number in (1, 2):
            found = await prepared(database)
            assert len(found.keys() & set(declared())) == number
            await asyncio.sleep(0)  # the session is lent again
        await database.prepared.done()
        assert database.connections == (1, 0, 0)


async def test_a_caller_that_has_waited_for_long_gets_another_session(dsn: str) -> None:
    locker = await asyncpg.connect(dsn)
    try:
        async with (
            asyncio.timeout(60),
            locker.transaction(),
            await Database.open(dsn) as database,
        ):
            await locker.execute("LOCK TABLE stream_positions, deployment, rooms, principals")
            async with running(database.prepared.run()):
                while not await locker.fetchval(SQL_WAITING):
                    await pause()
                async with database.connection() as conn:
                    assert await conn.fetchval("SELECT 1") == 1
                    assert database.connections == (2, 2, 0)
                await locker.execute("ROLLBACK")
                await locker.execute("BEGIN")
    finally:
        await locker.close()


async def test_a_statement_that_cannot_be_prepared_is_logged(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin = await asyncpg.connect(dsn)
    await admin.execute("ALTER TABLE receipts RENAME TO lost_receipts")
    await admin.close()
    async with preparing(dsn) as database:
        await database.prepared.done()
        found = await prepared(database)
    assert SQL_UNREAD not in found
    assert 0 < len(found.keys() & set(declared())) < len(declared())
    told = [record.message for record in caplog.records if record.name.endswith("prepared")]
    assert len(told) == len(set(declared()) - found.keys())
    assert all('relation "receipts" does not exist' in one for one in told)


@pytest.mark.parametrize("size", [0, 1])
async def test_a_driver_that_keeps_no_statement_keeps_its_session(
    dsn: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(session, "STATEMENTS_MAX", size)
    async with (
        await Database.open(dsn, config=ONE) as database,
        running(database.prepared.run()),
        asyncio.timeout(60),
    ):
        async with database.connection() as conn:
            first = conn.backend_pid
        await database.prepared.done()
        async with database.connection() as conn:
            assert conn.backend_pid == first
    assert [record.message for record in caplog.records if record.name.endswith("prepared")] == []


async def test_a_lost_session_is_replaced_by_one_that_is_prepared_as_well(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin = await asyncpg.connect(dsn)
    await admin.execute("BEGIN; LOCK TABLE stream_positions, deployment, rooms, principals")
    async with preparing(dsn) as database:
        while not await admin.fetchval(SQL_WAITING):
            await pause()
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name LIKE 'room-storage%' AND datname = current_database()"
        )
        await admin.close()
        await database.prepared.done()
        assert database.connections == (0, 0, 0)
        await prepared(database)
        await asyncio.sleep(0)
        await database.prepared.done()
        assert set(declared()) <= (await prepared(database)).keys()
    assert "cannot be prepared ahead" in caplog.text


async def test_closing_ends_the_preparing(dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER, config=Config(pool_size_max=2)) as store:
        database = store.database
    assert database.connections == (0, 0, 0)


async def test_a_store_that_only_reads_prepares_no_writes(dsn: str) -> None:
    async with preparing(dsn, read_only=True) as database:
        await database.prepared.done()
        found = (await prepared(database)).keys()
    assert found & set(declared()) == set(declared(read_only=True)) < set(declared())


async def test_opening_to_read_ends_no_session_that_prepares(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A first look at the server ends all sessions but its own."""
    async with storage.open(dsn, server_name=SERVER, config=replace(ONE, prepare_ahead=False)):
        pass
    config = Config(pool_size_max=4, prepare_ahead=True)
    async with storage.open(dsn, read_only=True, config=config) as store, asyncio.timeout(60):
        await store.database.prepared.done()
    assert "prepared ahead" not in caplog.text


async def test_a_store_can_do_without(dsn: str) -> None:
    config = Config(pool_size_max=1, prepare_ahead=False)
    async with storage.open(dsn, server_name=SERVER, config=config) as store:
        assert (await prepared(store.database)).keys() & set(declared(read_only=True)) == set()
