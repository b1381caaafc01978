"""An event id is stored once, though its index is not unique."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

import storage
from storage.database.connection import Database
from storage.persist import AppendResult, Origin, Outcome
from storage.testing import RoomBuilder
from tests.pausing import pause
from tests.persist.test_two_stores import two_stores
from tests.postgres import SQL_WAITING

SAME = "$same:s1.test"
SQL_STORED = "SELECT count(*) FROM events WHERE event_id = $1::text"
SQL_HOLD = "LOCK TABLE events IN SHARE MODE"


async def meeting(
    database: Database, *appends: Coroutine[Any, Any, list[AppendResult]]
) -> list[Outcome]:
    """Run appends of one event each; all have planned before one of them writes."""
    async with database.transaction() as conn:
        await conn.execute(SQL_HOLD)
        tasks = [asyncio.create_task(one) for one in appends]
        async with asyncio.timeout(60):
            while await conn.fetchval(SQL_WAITING) < len(tasks):
                await pause()
    return [result.outcome for [result] in await asyncio.gather(*tasks)]


async def test_two_stores_store_one_event_for_an_id_in_two_rooms(dsn: str) -> None:
    """Both have planned before either writes, so neither plan knows the other event."""
    rooms = [RoomBuilder("1", seed=seed) for seed in (1, 2)]
    async with two_stores(dsn) as stores, await Database.open(dsn) as database:
        for room, store in zip(rooms, stores, strict=True):
            room.start(room.user(1))
            await store.append(list(room.pdus), room_version="1")
        said = [room.message(room.user(1), "said", extra={"event_id": SAME}).pdu for room in rooms]
        outcomes = await meeting(
            database,
            *(
                store.append([pdu], room_version="1")
                for store, pdu in zip(stores, said, strict=True)
            ),
        )
        assert outcomes.count("stored") == 1, outcomes
        async with database.connection() as conn:
            assert await conn.fetchval(SQL_STORED, SAME) == 1


@pytest.mark.parametrize("origin", ["live", "outlier"])
async def test_two_stores_store_an_event_of_one_room_once(dsn: str, origin: Origin) -> None:
    room = RoomBuilder("11", seed=1)
    room.start(room.user(1))
    beginning = list(room.pdus)
    async with two_stores(dsn) as (one, two), await Database.open(dsn) as database:
        await one.append(beginning)
        await two.append([room.message(room.user(1), "fills the caches").pdu])
        said = room.message(room.user(1), "said")
        outcomes = await meeting(
            database, *(store.append([said.pdu], origin=origin) for store in (one, two))
        )
        assert sorted(outcomes) == ["duplicate", "stored"]
        async with database.connection() as conn:
            assert await conn.fetchval(SQL_STORED, said.event_id) == 1


@pytest.mark.parametrize("topic", [False, True])
async def test_an_event_that_a_store_takes_for_new_is_looked_for(dsn: str, *, topic: bool) -> None:
    """The caches have its parents, and have lost the event itself.

    With a topic in the batch the statement is the one for all tables.
    """
    room = RoomBuilder("11", seed=1)
    admin = room.user(1)
    room.start(admin)
    beginning = list(room.pdus)
    known, later = room.message(admin, "known"), room.message(admin, "later")
    beside = [room.topic(admin, "new").pdu] if topic else []
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(beginning)
        await store.append([known.pdu, later.pdu])
        del store.writer.caches.rows[known.event_id]
        again, *_ = await store.append([known.pdu, *beside])
        assert again.outcome == "duplicate"
        async with store.database.connection() as conn:
            assert await conn.fetchval(SQL_STORED, known.event_id) == 1
