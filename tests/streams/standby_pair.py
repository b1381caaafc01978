"""Stores on a primary and its standby, and a standby that stops to replay for a while."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import storage
from storage import Config, Store
from storage.streams.reads import STANDBY
from tests.failover import ReplicatedPair, ask, value
from tests.maintenance.rooms import SERVER
from tests.pausing import pause
from tests.streams.lossy import timeline

CONFIG = Config(follow_ms=50, pool_size_max=4)
ALONE = Config(follow_ms=3_600_000, pool_size_max=4, replica_wait_ms=1_000, prepare_ahead=False)
"""A process that hears nothing of the others.

Each new session is compared with the primary, so none is opened in the background.
"""
PATIENT = Config(follow_ms=50, pool_size_max=4, replica_wait_ms=20_000)


def on_primary(
    pair: ReplicatedPair, name: str, config: Config = CONFIG
) -> AbstractAsyncContextManager[Store]:
    """A store without a standby."""
    dsn = pair.rooms(pair.primary)
    return storage.open(dsn, server_name=SERVER, instance_name=name, config=config)


def with_standby(
    pair: ReplicatedPair, name: str, config: Config = CONFIG, **options: Any
) -> AbstractAsyncContextManager[Store]:
    """A store that reads from the standby."""
    return storage.open(
        options.pop("dsn", pair.rooms(pair.primary)),
        server_name=SERVER,
        instance_name=name,
        config=config,
        replica_dsn=options.pop("replica_dsn", pair.rooms(pair.standby)),
        **options,
    )


@asynccontextmanager
async def on_standby(
    pair: ReplicatedPair, name: str = "reader", config: Config = CONFIG
) -> AsyncIterator[Store]:
    """A store that only reads, opened when the standby has all that the primary has."""
    await pair.caught_up()
    dsn = pair.rooms(pair.standby)
    async with storage.open(dsn, instance_name=name, config=config, read_only=True) as store:
        yield store


@asynccontextmanager
async def paused(pair: ReplicatedPair) -> AsyncIterator[None]:
    """The standby replays nothing during a block, and all after it."""
    await pair.caught_up()
    await ask(pair.standby.dsn, "SELECT pg_wal_replay_pause()")
    while await value(pair.standby.dsn, "SELECT pg_get_wal_replay_pause_state()") != "paused":
        await pause()
    try:
        yield
    finally:
        await ask(pair.standby.dsn, "SELECT pg_wal_replay_resume()")
        await pair.caught_up()


@asynccontextmanager
async def crashed(pair: ReplicatedPair, *, replays_to: str) -> AsyncIterator[None]:
    """The standby was killed, and has replayed up to a position of the log again."""
    standby = pair.standby
    settings = standby.directory / "postgresql" / "postgresql.auto.conf"
    kept = settings.read_text(encoding="utf-8")
    assert standby.pid is not None
    os.kill(standby.pid, signal.SIGQUIT)
    await asyncio.to_thread(standby.stop)
    settings.write_text(f"{kept}recovery_target_lsn = '{replays_to}'\n", encoding="utf-8")
    await asyncio.to_thread(standby.start)
    try:
        yield
    finally:
        await asyncio.to_thread(standby.stop)
        settings.write_text(kept, encoding="utf-8")
        await asyncio.to_thread(standby.start)
        await pair.caught_up()


async def answered_by_standby(pair: ReplicatedPair, store: Store) -> str:
    """Sync until the standby alone answers: a busy one may be behind. Return the token."""
    async with asyncio.timeout(60):
        while True:
            await pair.caught_up()
            outcomes(store)
            token = (await timeline(store, None))[1]
            if outcomes(store).keys() == {STANDBY}:
                return token
            await asyncio.sleep(0.01)


def outcomes(store: Store) -> Counter[str]:
    """How many reads were answered where, since the last call."""
    counted = Counter(store.measures.replica_reads)
    store.measures.replica_reads.clear()
    return counted
