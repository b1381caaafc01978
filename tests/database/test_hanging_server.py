"""A server that keeps its connections and does not answer."""

import asyncio

import pytest

from storage.config import Config
from storage.database import Connection, Database, pool
from storage.database.connection import ATTEMPTS_MAX
from storage.errors import DatabaseUnavailable
from tests.replication.proxies import Proxy, through, unix_socket_of

SIZE = 4


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SETTLE_SECONDS", 0.2)


async def test_closing_waits_for_one_session(dsn: str) -> None:
    """The others end without a word, and `close` raises nothing."""
    config = Config(pool_size_min=SIZE, pool_size_max=SIZE)
    async with Proxy(unix_socket_of(dsn)) as proxy, asyncio.timeout(60):
        database = await Database.open(through(dsn, proxy.port), config=config)
        assert database.connections == (SIZE, 0, 0)
        proxy.flows.clear()
        await database.close()
        assert database.connections == (0, 0, 0)


async def test_a_new_session_without_an_answer_is_no_full_pool(dsn: str) -> None:
    config = Config(
        pool_size_min=0, pool_size_max=1, connect_timeout_ms=200, pool_acquire_timeout_ms=600_000
    )
    async with (
        Proxy(unix_socket_of(dsn)) as proxy,
        await Database.open(through(dsn, proxy.port), config=config) as database,
        asyncio.timeout(60),
    ):
        proxy.flows.clear()
        with pytest.raises(
            DatabaseUnavailable,
            match=f"^cannot connect to Postgres at .*:{proxy.port}: no answer within",
        ):
            await database.acquire()


@pytest.mark.parametrize("waits_ms, attempts", [(1_000, 1), (600_000, ATTEMPTS_MAX)])
async def test_a_write_that_has_waited_for_long_is_not_repeated(
    dsn: str, waits_ms: int, attempts: int
) -> None:
    config = Config(pool_acquire_timeout_ms=waits_ms)
    made = 0

    async def unanswered(_: Connection) -> None:
        nonlocal made
        made += 1
        await asyncio.sleep(1.1)
        raise DatabaseUnavailable("no answer within the time limit")

    async with await Database.open(dsn, config=config) as database, asyncio.timeout(60):
        with pytest.raises(DatabaseUnavailable):
            await database.run(unanswered)
    assert made == attempts
