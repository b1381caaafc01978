"""A standby that takes connections and does not answer: reads go to the primary after a short time.

Nothing here depends on the statement timeout, which is far longer than a test may take.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

import storage
from storage import Config, DatabaseUnavailable, EventId, Store
from storage.database import Connection
from storage.streams import standby as standby_watch
from storage.streams.reads import CANCELLED, FAILED, RESTING, STANDBY
from tests.failover import ReplicatedPair
from tests.replication.proxies import Proxy, through, unix_socket_of
from tests.streams.lossy import FailoverRoom
from tests.streams.standby_pair import answered_by_standby, on_primary, outcomes, with_standby

POOL: int = 4
CONFIG = Config(
    follow_ms=3_600_000,
    pool_size_max=POOL,
    replica_wait_ms=20_000,
    pool_acquire_timeout_ms=600_000,
    statement_timeout_ms=600_000,
    prepare_ahead=False,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[ReplicatedPair]:
    async with ReplicatedPair() as opened, on_primary(opened, "main"):
        await opened.caught_up()
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(pair: ReplicatedPair) -> AsyncIterator[Proxy]:
    """It leads to the standby."""
    async with Proxy(unix_socket_of(pair.standby.dsn)) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def store(pair: ReplicatedPair, proxy: Proxy) -> AsyncIterator[Store]:
    dsn = through(pair.rooms(pair.standby), proxy.port)
    async with with_standby(pair, "b", CONFIG, replica_dsn=dsn) as opened:
        yield opened


async def written(pair: ReplicatedPair, store: Store, seed: int) -> EventId:
    """Return the id of an event that the standby has, with the whole pool of sessions open."""
    event_id = (await FailoverRoom(seed).write(store, 1))[0]
    await answered_by_standby(pair, store)
    await asyncio.gather(*(store.event(event_id) for _ in range(4 * POOL)))
    outcomes(store)
    return event_id


async def back_on_the_standby(store: Store, event_id: EventId) -> None:
    async with asyncio.timeout(60):
        while not outcomes(store)[STANDBY]:
            assert await store.event(event_id) is not None
            await asyncio.sleep(0.01)


async def test_new_reads_of_a_standby_that_hangs(
    pair: ReplicatedPair, store: Store, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    event_id = await written(pair, store, 301)
    standby = store.reads.standby
    assert standby is not None
    proxy.flows.clear()
    standby._polled_at = float("-inf")  # as after `follow_ms`: each read looks at it first
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(store.event(event_id) for _ in range(5 * POOL)))
        assert None not in found
        assert outcomes(store).keys() <= {FAILED, CANCELLED}
        for _ in range(20):  # at once
            assert await store.event(event_id) is not None
    assert outcomes(store) == {RESTING: 20}
    assert "no answer within 3 s" in caplog.text
    proxy.flows.set()
    await back_on_the_standby(store, event_id)


async def test_reads_that_go_on_when_a_standby_hangs(
    pair: ReplicatedPair, store: Store, proxy: Proxy
) -> None:
    """No other read looks at the standby: the slow ones have it checked."""
    event_id = await written(pair, store, 302)
    begun = 0
    all_begun = asyncio.Event()

    async def slow(conn: Connection) -> int:
        nonlocal begun
        begun += 1
        if begun <= POOL:
            if begun == POOL:
                all_begun.set()
            await conn.fetchval("SELECT pg_sleep(600)")
        return int(await conn.fetchval("SELECT 1"))

    # half of them wait for a session
    reads = [asyncio.create_task(store.reads.run(slow, snapshot=bool(i % 2))) for i in range(8)]
    async with asyncio.timeout(60):
        await all_begun.wait()
        proxy.flows.clear()
        assert await asyncio.gather(*reads) == [1] * 8
    assert not outcomes(store)[STANDBY]
    proxy.flows.set()
    await back_on_the_standby(store, event_id)


async def test_sessions_that_hang_are_replaced(
    pair: ReplicatedPair, store: Store, proxy: Proxy
) -> None:
    """As after the loss of a firewall's state: new connections work, the old ones do not."""
    event_id = await written(pair, store, 303)
    standby = store.reads.standby
    assert standby is not None
    lost, proxy.answers = proxy.answers, asyncio.Event()
    lost.clear()
    proxy.answers.set()
    standby._polled_at = float("-inf")
    async with asyncio.timeout(60):
        assert await store.event(event_id) is not None
        assert not outcomes(store)[STANDBY]
        await back_on_the_standby(store, event_id)
    lost.set()


async def test_a_read_of_a_standby_alone_is_not_repeated_for_long(
    pair: ReplicatedPair, proxy: Proxy
) -> None:
    config = replace(CONFIG, pool_acquire_timeout_ms=1_000, pool_size_min=POOL)
    dsn = through(pair.rooms(pair.standby), proxy.port)
    async with storage.open(dsn, config=config, read_only=True) as reader, asyncio.timeout(60):
        await reader.rooms([])
        outcomes(reader)
        standby = reader.reads.standby
        assert standby is not None
        proxy.flows.clear()
        standby._polled_at = float("-inf")
        with pytest.raises(DatabaseUnavailable, match="no answer within 3 s"):
            await reader.rooms([])
        assert outcomes(reader) == {FAILED: 1}
        proxy.flows.set()
        await reader.rooms([])
        assert outcomes(reader)[STANDBY] == 1


async def test_a_slow_read_of_the_standby_is_not_ended(
    pair: ReplicatedPair, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(pair, store, 304)
    monkeypatch.setattr(standby_watch, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(standby_watch, "ANSWER_SECONDS", 60.0)  # a busy machine may be slow
    failure, checks = standby_watch.StandbyWatch._failure, list[str | None]()

    async def counted(watch: standby_watch.StandbyWatch) -> str | None:
        checks.append(await failure(watch))
        return checks[-1]

    async def slow(conn: Connection) -> int:
        while len(checks) < 3:
            await conn.fetchval("SELECT pg_sleep(0.1)")
        return int(await conn.fetchval("SELECT 1"))

    monkeypatch.setattr(standby_watch.StandbyWatch, "_failure", counted)
    # all sessions are in use, so none is left for a check
    assert await asyncio.gather(*(store.reads.run(slow) for _ in range(POOL))) == [1] * POOL
    assert set(checks) == {None}
    assert outcomes(store) == {STANDBY: POOL}
