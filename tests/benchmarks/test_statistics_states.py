"""Databases in which statistics mislead the planner: they are what their states say, and valid."""

import time
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

import storage
from benchmarks.crowd import SERVER
from benchmarks.statistics_states import (
    BY_NAME,
    MEMBER,
    OTHERS,
    SMALL,
    BigRoom,
    StatesServer,
)
from storage.ids import EventId, RoomId
from storage.maintenance.verify.run import verify

pytestmark = [
    pytest.mark.xdist_group("statistics"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.every_postgres,
]

EVENTS = 1_000
VERIFIED = ("half-purged",)

SQL_ESTIMATE = """
SELECT reltuples::bigint
FROM pg_class
WHERE relname = 'events' AND relkind = 'r'
"""
SQL_COUNT = """
SELECT count(*)
FROM events
WHERE room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def states(
    server_dsn: str, template_name: str, worker_id: str
) -> AsyncIterator[StatesServer]:
    server = StatesServer(server_dsn, template_name, f"states_{worker_id}_{time.monotonic_ns()}")
    yield server
    await server.close()


async def numbers(room: BigRoom) -> tuple[int, int, int]:
    """Return the estimated events, the events, and those of the big room."""
    driver = await asyncpg.connect(room.dsn)
    try:
        return (
            await driver.fetchval(SQL_ESTIMATE),
            await driver.fetchval("SELECT count(*) FROM events"),
            await driver.fetchval(SQL_COUNT, room.room_id),
        )
    finally:
        await driver.close()


@pytest.mark.parametrize("name", BY_NAME)
async def test_a_state_is_what_it_says(states: StatesServer, name: str) -> None:
    state = BY_NAME[name]
    room = await states.create(state, EVENTS)
    estimated, all_events, of_room = await numbers(room)
    others = all_events - of_room
    assert others > 20 * OTHERS if state.others else others == 0
    assert EVENTS / 3 < of_room < EVENTS / 2 + 150 if state.purged else of_room > EVENTS
    match state.analysed:
        case "never":
            assert estimated == -1
        case "small":
            assert others < estimated < others + 2 * SMALL
        case "now":
            assert estimated > others + EVENTS
    driver = await asyncpg.connect(room.dsn)
    try:
        for setting, value in state.settings.items():
            assert await driver.fetchval("SELECT current_setting($1)", setting) == value
    finally:
        await driver.close()
    async with storage.open(room.dsn, server_name=SERVER) as store:
        if name in VERIFIED:
            found = [finding async for finding in verify(store.database, server_name=SERVER)]
            assert found == []
        page = await store.messages(RoomId(room.room_id), MEMBER, limit=100)
        assert page.chunk[0].event_id == room.pen.tip
        assert len(page.chunk) == 100
        replies = await store.relations(EventId(room.root_id), MEMBER, limit=30)
        assert 20 <= len(replies.chunk) < 30
        assert await store.event(EventId(room.middle_id)) is not None
    await states.drop(room)


async def test_a_copy_has_the_settings_and_is_another_database(states: StatesServer) -> None:
    room = await states.create(BY_NAME["page-cost-4"], EVENTS)
    copied = await states.copied(room)
    assert copied.dsn != room.dsn
    async with storage.open(copied.dsn, server_name=SERVER) as store:
        written = copied.pen.leave(MEMBER)
        [result] = await store.append([written], room_version="11")
        assert result.outcome == "stored"
    assert (await numbers(copied))[2] == (await numbers(room))[2] + 1
    driver = await asyncpg.connect(copied.dsn)
    try:
        assert await driver.fetchval("SELECT current_setting('random_page_cost')") == "4"
    finally:
        await driver.close()
