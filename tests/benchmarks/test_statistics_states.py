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
    StatisticsState,
)
from storage.ids import EventId, RoomId
from storage.maintenance.verify.run import verify_room
from tests.plans.chosen import states_of

pytestmark = [
    pytest.mark.xdist_group("statistics-states"),
    pytest.mark.asyncio(loop_scope="module"),
]

EVENTS = 1_000
VERIFIED = ("half-purged",)

SQL_ANALYSED = """
SELECT reltuples::bigint, relpages, pg_relation_size(oid) / current_setting('block_size')::int
FROM pg_class
WHERE relname = 'events' AND relkind = 'r'
"""
"""The estimated rows, the pages that there were when it was analysed, and those of now."""
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


async def numbers(room: BigRoom) -> tuple[int, int]:
    """Return the number of events, and of those of the big room."""
    driver = await asyncpg.connect(room.dsn)
    try:
        return (
            await driver.fetchval("SELECT count(*) FROM events"),
            await driver.fetchval(SQL_COUNT, room.room_id),
        )
    finally:
        await driver.close()


def check_analysed(
    state: StatisticsState, estimated: int, pages_then: int, pages: int, others: int
) -> None:
    """Check what Postgres knows. The rows are exact, but for a sample of 300 rows with target 1."""
    match state.analysed:
        case "never":
            assert (estimated, pages_then) == (-1, 0)
        case "small":
            assert others < estimated < others + 2 * SMALL
            assert 0 < pages_then < pages - EVENTS // 100
        case "now":
            assert pages_then <= pages if state.purged else pages_then == pages
            assert estimated > others + EVENTS or state.name == "target-1"


@pytest.mark.parametrize("name", states_of(BY_NAME))
async def test_a_state_is_what_it_says(states: StatesServer, name: str) -> None:
    state = BY_NAME[name]
    room = await states.create(state, EVENTS)
    all_events, of_room = await numbers(room)
    others = all_events - of_room
    assert others > 20 * OTHERS if state.others else others == 0
    assert EVENTS / 3 < of_room < EVENTS / 2 + 150 if state.purged else of_room > EVENTS
    driver = await asyncpg.connect(room.dsn)
    try:
        estimated, pages_then, pages = await driver.fetchrow(SQL_ANALYSED)
        for setting, value in state.settings.items():
            assert await driver.fetchval("SELECT current_setting($1)", setting) == value
    finally:
        await driver.close()
    check_analysed(state, estimated, pages_then, pages, others)
    async with storage.open(room.dsn, server_name=SERVER) as store:
        if name in VERIFIED:
            async with store.database.transaction(isolation="repeatable_read") as conn:
                found = [one async for one in verify_room(conn, room.room_id, server_name=SERVER)]
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
    assert (await numbers(copied))[1] == (await numbers(room))[1] + 1
    driver = await asyncpg.connect(copied.dsn)
    try:
        assert await driver.fetchval("SELECT current_setting('random_page_cost')") == "4"
    finally:
        await driver.close()
