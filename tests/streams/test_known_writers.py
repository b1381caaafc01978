"""A writer whose name is known enters beside running writes; a new one waits for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import asyncpg
import pytest

import storage
from storage.config import Config
from storage.database import Database
from storage.pipeline.imports import load_rooms
from storage.pipeline.imports.load_rooms import register_names
from storage.streams.feed import Advance
from storage.streams.position_poller import follow_once
from storage.streams.startup import lock_positions
from storage.testing import RoomBuilder
from tests.pausing import pause
from tests.persist.writing import outcomes
from tests.postgres import SQL_WAITING

SERVER = "s1.test"
ALICE = "@alice:s1.test"


CONFIG = Config(follow_ms=3_600_000, lock_timeout_ms=60_000)
IMPATIENT = replace(CONFIG, lock_timeout_ms=200)


def opened(
    dsn: str, name: str, config: Config = CONFIG
) -> AbstractAsyncContextManager[storage.Store]:
    return storage.open(dsn, server_name=SERVER, instance_name=name, config=config)


@asynccontextmanager
async def running_write(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Hold what a write holds until its commit."""
    conn = await asyncpg.connect(dsn)
    await conn.execute("BEGIN; LOCK TABLE stream_positions IN ROW EXCLUSIVE MODE")
    yield conn
    await conn.close()


async def test_only_a_new_name_waits_for_a_running_write(dsn: str) -> None:
    room = RoomBuilder("11", seed=1)
    room.start(ALICE)
    async with opened(dsn, "known"):
        pass
    async with running_write(dsn):
        async with opened(dsn, "known") as store:
            assert {one.outcome for one in await store.append(room.pdus)} == {"stored"}
        with pytest.raises(storage.DatabaseConflict):
            async with opened(dsn, "new", IMPATIENT):
                pass


async def test_a_name_that_waits_lets_others_write(dsn: str) -> None:
    """It takes longer than the test if the write of another process has to wait for the new one."""
    room = RoomBuilder("11", seed=1)
    room.start(ALICE)
    entered = asyncio.Event()

    async def enter() -> None:
        async with opened(dsn, "new") as store:
            entered.set()
            assert outcomes(await store.append([room.message(ALICE, "of new").pdu])) == {"stored"}

    async with asyncio.timeout(30), opened(dsn, "known") as store, running_write(dsn) as holding:
        await store.append(room.pdus)
        entering = asyncio.create_task(enter())
        for number in range(3):
            while not await holding.fetchval(SQL_WAITING):
                await pause()
            append = store.append([room.message(ALICE, str(number)).pdu])
            assert outcomes(await append) == {"stored"}
        assert not entered.is_set()
        await holding.execute("COMMIT")
        await entering


async def test_the_lock_timeout_is_as_before_after_a_try(database: Database) -> None:
    async with database.transaction() as conn:
        before = await conn.fetchval("SHOW lock_timeout")
        await lock_positions(conn)
        assert await conn.fetchval("SHOW lock_timeout") == before


async def test_it_does_not_pass_an_id_in_flight(dsn: str) -> None:
    """Its position moves past the id, as that of an idle writer does. No reader may follow it."""
    room = RoomBuilder("11", seed=1)
    room.start(ALICE)
    told: list[Advance] = []
    async with opened(dsn, "known"), opened(dsn, "other") as other:
        await other.append(room.pdus)
    async with opened(dsn, "other") as other:
        holding = await asyncpg.connect(dsn)
        await holding.execute("BEGIN; SELECT FROM rooms FOR UPDATE")
        writing = asyncio.create_task(other.append([room.message(ALICE, "in flight").pdu]))
        while not await holding.fetchval(SQL_WAITING):  # until it has its id
            await holding.execute("SELECT pg_sleep(0.02)")
        taken = await holding.fetchval("SELECT last_value FROM events_stream")
        async with opened(dsn, "known") as store:
            store.streams.feed.subscribe(told.append)
            events = store.streams["events"]
            assert events.positions()["known"] == taken
            assert events.positions()["other"] < taken
            assert events.linear() < taken
            assert events.generator.linear() < taken
            await holding.close()
            assert [one.outcome for one in await writing] == ["stored"]
            await follow_once(store.database, store.streams)
            facts = [fact.stream_id for one in told for fact in one.rows]
            assert facts == [taken]
            assert events.linear() == taken


async def test_registered_names_are_known(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are at work are left alone. Where all are known, nothing is locked."""
    room = RoomBuilder("11", seed=1)
    room.start(ALICE)
    async with opened(dsn, "spark-0") as store:
        register_names(dsn, ["spark-0", "spark-1"], config=CONFIG)
        assert {one.outcome for one in await store.append(room.pdus)} == {"stored"}
        async with running_write(dsn):
            register_names(dsn, ["spark-2"], config=CONFIG)
            async with opened(dsn, "spark-1"):
                pass
            with pytest.raises(storage.DatabaseConflict):
                async with opened(dsn, "spark-2", IMPATIENT):
                    pass
        monkeypatch.setattr(load_rooms, "SQL_LOCK", "SELECT 1 / 0")
        with pytest.raises(storage.DatabaseError):
            register_names(dsn, ["spark-3"], config=CONFIG)
        register_names(dsn, ["spark-0", "spark-1"], config=CONFIG)
