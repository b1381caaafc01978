"""The pool lends sessions in the order of requests and loses none.

Where Postgres accepts no more sessions, callers wait for the open ones.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter

import asyncpg
import pytest

import storage
from storage import UserId
from storage.config import Config
from storage.database import Database, pool
from storage.database.embedded import EmbeddedPostgres
from storage.database.session import Session
from storage.errors import DatabaseUnavailable, StorageClosed
from storage.testing import RoomBuilder
from tests.postgres import chosen_binaries, with_database

ALICE = UserId("@alice:s1.test")
ROLE = "storage_test_limited"


@pytest.fixture
async def limited(dsn: str, worker_id: str) -> AsyncIterator[str]:
    """A login that may have two sessions."""
    role = f"{ROLE}_{worker_id}"
    admin = await asyncpg.connect(dsn)
    try:
        await admin.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 2")
        yield dsn.replace("postgres@", f"{role}@", 1)
        await admin.execute(f"DROP ROLE {role}")
    finally:
        await admin.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Until it is, which it will be once others have had their turn."""
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)


async def pid(database: Database) -> int:
    async with database.connection() as conn:
        return int(await conn.fetchval("SELECT pg_backend_pid()"))


# --------------------------------------------------------------------------------------------------
# refused


async def test_where_postgres_refuses_another_session_callers_wait_for_an_open_one(
    limited: str,
) -> None:
    async with await Database.open(
        limited, config=Config(pool_size_max=8, pool_acquire_timeout_ms=60_000)
    ) as database:
        async with asyncio.timeout(60):
            used = await asyncio.gather(*(pid(database) for _ in range(60)))
        assert 1 <= len(set(used)) <= 2
        assert database.connections[1:] == (0, 0)


async def test_a_refusal_is_raised_when_the_time_is_over(
    limited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        await Database.open(limited, config=Config(pool_size_max=8)) as database,
        database.connection(),
        database.connection(),
    ):
        patient = asyncio.create_task(pid(database))
        await until(lambda: database._pool._refusal is not None)
        hurried = Config(pool_size_max=8, pool_acquire_timeout_ms=200)
        with monkeypatch.context() as patch:
            patch.setattr(database, "_config", hurried)
            with pytest.raises(DatabaseUnavailable, match="53300"):
                await pid(database)
        patient.cancel()
        await asyncio.wait([patient])
        assert database.connections == (2, 2, 0)


async def test_without_an_open_session_a_refusal_is_raised_at_once(limited: str) -> None:
    async with (
        await Database.open(limited, config=Config(pool_size_max=2)) as full,
        full.connection(),
        full.connection(),
    ):
        with pytest.raises(DatabaseUnavailable, match="53300"):
            await Database.open(limited)


async def test_if_one_of_the_first_sessions_is_refused_none_stays_open(dsn: str) -> None:
    begun: list[int] = []
    ended: list[int] = []

    async with await Database.open(dsn) as database:

        async def connect() -> Session:
            begun.append(number := len(begun))
            try:
                if number == 1:
                    raise asyncpg.TooManyConnectionsError("refused")
                return await database._checked()
            finally:
                ended.append(number)

        first = pool.Pool(connect, size_min=4, size_max=4)
        with pytest.raises(asyncpg.TooManyConnectionsError):
            await first.fill()
        await until(lambda: len(ended) == len(begun) == 4)
        await asyncio.sleep(0)
        assert first.size == 0


async def test_a_session_is_opened_as_soon_as_postgres_accepts_one_again(
    limited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "REFUSED_SECONDS", 0.02)
    other = await asyncpg.connect(limited)
    async with (
        await Database.open(limited, config=Config(pool_size_max=8)) as database,
        database.connection(),
    ):
        waiting = asyncio.create_task(pid(database))
        await until(lambda: database.connections[2] == 1 and database._pool._refusal is not None)
        await other.close()
        async with asyncio.timeout(60):
            assert await waiting
        assert database.connections[0] == 2


async def test_few_try_where_one_was_refused(limited: str) -> None:
    """A hundred callers do not knock at the door of Postgres all at once, again and again."""
    async with await Database.open(limited, config=Config(pool_size_max=50)) as database:
        tried = 0
        connect = database._pool._connect

        async def counted() -> Session:
            nonlocal tried
            tried += 1
            return await connect()

        async with database.connection(), database.connection():
            pass  # all that the role may have: else the second one would come later
        database._pool._connect = counted
        await asyncio.gather(*(pid(database) for _ in range(100)))  # nobody knows yet
        tried, began = 0, perf_counter()
        for _ in range(5):
            await asyncio.gather(*(pid(database) for _ in range(100)))
        assert tried <= 1 + (perf_counter() - began) / pool.REFUSED_SECONDS


@pytest.mark.timeout(300)
async def test_syncs_and_appends_wait_while_max_connections_is_exhausted(tmp_path: Path) -> None:
    config = Config(
        embedded_connections_max=15, embedded_shared_buffers_mb=16, embedded_fsync=False
    )
    server = EmbeddedPostgres(tmp_path / "full", config=config, binaries=chosen_binaries())
    try:
        dsn = server.start()
        room = RoomBuilder("12", seed=1)
        room.start(ALICE)
        async with (
            AsyncExitStack() as stack,
            storage.open(dsn, server_name="s1.test", config=config, migrate=True) as store,
        ):
            await store.append(room.pdus)
            first = await store.sync(ALICE)
            others = 0
            with pytest.raises(asyncpg.TooManyConnectionsError):
                while True:
                    stack.push_async_callback(
                        (await asyncpg.connect(with_database(dsn, "postgres"))).close
                    )
                    others += 1
            assert others > 5
            open_before = store.database.connections[0]
            said = [room.message(ALICE, f"{number}") for number in range(20)]
            async with asyncio.timeout(60):
                syncs = asyncio.gather(
                    *(store.sync(ALICE, since=first.next_batch) for _ in range(100))
                )
                stored = await asyncio.gather(*(store.append([event.pdu]) for event in said))
                await syncs
            assert {result.outcome for [result] in stored} == {"stored"}
            assert store.database.connections[0] == open_before
    finally:
        server.stop()


# --------------------------------------------------------------------------------------------------
# lent out in turn


async def test_callers_get_a_session_in_the_order_of_asking(dsn: str) -> None:
    async with await Database.open(dsn, config=Config(pool_size_max=1)) as database:
        served: list[int] = []

        async def ask(number: int) -> None:
            async with database.connection() as conn:
                served.append(number)
                await conn.fetchval("SELECT 1")

        async with database.connection():
            asking = [asyncio.create_task(ask(number)) for number in range(20)]
            await until(lambda: database.connections[2] == 20)
        late = asyncio.create_task(ask(20))
        await asyncio.gather(*asking, late)
        assert served == list(range(21))


async def test_a_session_that_comes_to_a_caller_who_is_gone_goes_on_to_the_next(dsn: str) -> None:
    async with await Database.open(dsn, config=Config(pool_size_max=1)) as database:
        held = await database.acquire()
        gone, next_one = (asyncio.create_task(pid(database)) for _ in range(2))
        await until(lambda: database.connections[2] == 2)
        await database.release(held)  # it is theirs now, and they have not run yet
        gone.cancel()
        async with asyncio.timeout(60):
            assert await next_one
        assert database.connections == (1, 0, 0)


async def test_who_waits_when_the_database_is_closed_is_told(dsn: str) -> None:
    database = await Database.open(dsn, config=Config(pool_size_max=1))
    held = await database.acquire()
    waiting = asyncio.create_task(pid(database))
    await until(lambda: database.connections[2] == 1)
    closing = asyncio.create_task(database.close())
    with pytest.raises(StorageClosed):
        await waiting
    assert not closing.done()
    await database.release(held)
    await closing
    assert database.connections == (0, 0, 0)


async def test_closing_that_is_cancelled_ends_what_is_lent_out(dsn: str) -> None:
    database = await Database.open(dsn, config=Config(pool_size_max=2))
    held = await database.acquire()
    closing = asyncio.create_task(database.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(DatabaseUnavailable):
        await held.fetchval("SELECT 1")
    await database.release(held)
    assert database.connections == (0, 0, 0)


async def test_what_nobody_has_used_for_long_is_ended(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Database.open(
        dsn, config=Config(pool_size_min=2, pool_size_max=8)
    ) as database:
        async with AsyncExitStack() as stack:
            for _ in range(5):
                await stack.enter_async_context(database.connection())
        assert database.connections == (5, 0, 0)
        await pid(database)
        assert database.connections == (5, 0, 0)
        monkeypatch.setattr(pool, "IDLE_SECONDS_MAX", -1)
        await pid(database)
        assert database.connections == (2, 0, 0)


async def test_a_caller_who_is_cancelled_while_a_session_is_opened_leaves_room_for_others(
    dsn: str,
) -> None:
    async with await Database.open(
        dsn, config=Config(pool_size_min=0, pool_size_max=1)
    ) as database:
        for turns in range(40):
            asking = asyncio.create_task(pid(database))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            async with asyncio.timeout(60):
                assert await pid(database)
