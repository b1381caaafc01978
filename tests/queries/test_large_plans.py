"""Plans of every hot query among 500,000 events: indexes, number of statements, rows read.

`STORAGE_PLAN_EVENTS` sets another number; `make soak` sets a million.

benchmarks/crowd.py makes the database once. The test adds the names of many more rooms and
users, because no plan may depend on these. Each query of `storage.store.catalogue` has
a line in `EXPECTED`. Both plans must do: the one for the given arguments, and the generic one that
a session may keep. The size of the answer bounds the rows read: in a database with fewer
events the same queries read as many rows.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import NamedTuple

import asyncpg
import pytest

from benchmarks.crowd import DEPTH_MS, EVERYWHERE, FEW, FIRST_MS, STEP_MS, Crowd, build, room_id
from storage.database.connection import Connection, Database
from storage.database.explained import ExplainingConnection, QueryPlan
from storage.store.catalogue import QUESTIONS, QueryArguments, prepared, token_behind
from tests.conftest import _fresh_database

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("crowd"), pytest.mark.timeout(900)]

EVENTS = int(os.environ.get("STORAGE_PLAN_EVENTS", "500000"))
LARGE = Crowd(300, EVENTS, 1_000, body=10, thread=100)
SMALL = Crowd(100, 10_000, 1_000, body=10, thread=20)
NAMES = 30_000
LIMIT = 20
BEHIND = 50

SQL_BIG_TABLES = """
SELECT relname FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND reltuples > 1000
"""
SQL_NAMES = """
WITH
key AS (
    INSERT INTO state_keys (state_key_nid, type_nid, state_key)
    SELECT 100000000 + n, 2, '@other' || n || ':s9.test' FROM generate_series(1, $1::int) AS n
),
principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT 100000000 + n, '@other' || n || ':s9.test' FROM generate_series(1, $1::int) AS n
)
INSERT INTO rooms (write_version, room_nid, next_audience, max_topological_ordering, room_id,
    room_version, forward_extremities)
SELECT 1, 100000000 + n, 0, 0, '!other' || n || ':s9.test', '11', '{}'
    FROM generate_series(1, $1::int) AS n
"""
SQL_ROOT = """
SELECT root.event_id FROM (
    SELECT e.room_nid, e.relates_to
    FROM rooms r JOIN events e USING (room_nid)
    WHERE r.room_id = $1 AND e.relates_to IS NOT NULL
    GROUP BY e.room_nid, e.relates_to
    HAVING count(*) > 1
    ORDER BY max(e.topological_ordering) DESC
    LIMIT 1
) thread
    JOIN events root
        ON root.room_nid = thread.room_nid AND relation_key(root.event_id) = thread.relates_to
"""

BY_ORDER, BY_STREAM, BY_TIME = (
    "events_room_topological_idx",
    "events_room_stream_idx",
    "events_out_of_order_idx",
)
BY_ID, BY_NID, BY_RELATION = "events_event_id_idx", "events_pkey", "events_relation_idx"


class Expected(NamedTuple):
    """Limits of a query: most statements, indexes it must use, most rows read per answer."""

    statements: int
    indexes: set[str]
    rows: int
    rows_each: int = 6
    """For each row of its answers."""


EXPECTED = {
    "sync": Expected(3, {"memberships_pkey", BY_STREAM}, 2 * LARGE.rooms + 200, 10),
    "sync-remembered": Expected(
        4, {"memberships_pkey", BY_STREAM, "events_stream_ordering_key"}, 2 * LARGE.rooms + 200, 10
    ),
    "sync-timelines": Expected(3, {"memberships_pkey", BY_STREAM}, 2 * LARGE.rooms + 200, 10),
    "initial-sync": Expected(
        3, {"memberships_pkey", BY_STREAM, "current_state_pkey"}, 2 * LARGE.rooms + 200, 10
    ),
    "lazy-sync": Expected(
        3,
        {"memberships_pkey", BY_STREAM, "state_keys_type_nid_state_key_key"},
        2 * LARGE.rooms + 300,
        12,
    ),
    "initial-lazy-sync": Expected(
        3, {"memberships_pkey", BY_STREAM, "state_groups_pkey"}, 2 * LARGE.rooms + 200, 12
    ),
    "sliding-sync": Expected(
        6, {"memberships_pkey", BY_STREAM, "current_state_pkey"}, 10 * LARGE.rooms, 20
    ),
    "messages": Expected(2, {BY_ORDER, "rooms_room_id_key"}, 100),
    "messages-forwards": Expected(2, {BY_ORDER, "rooms_room_id_key"}, 100),
    "messages-since": Expected(2, {BY_ORDER, BY_STREAM, "rooms_room_id_key"}, 100),
    "context": Expected(3, {BY_ID, BY_ORDER, "state_groups_pkey"}, 200),
    "event-before": Expected(1, {BY_TIME}, 40),
    "event-after": Expected(1, {BY_TIME}, 40),
    "server-event-before": Expected(1, {BY_TIME}, 40),
    "server-event-after": Expected(1, {BY_TIME}, 40),
    "event": Expected(1, {BY_ID}, 5),
    "backfill": Expected(2, {BY_ID, BY_NID}, 100, 8),
    "missing-events": Expected(2, {BY_ID, BY_NID}, 100, 8),
    "state-ids": Expected(2, {BY_ID, "state_groups_pkey", "auth_chains_pkey"}, 40_000),
    "event-auth": Expected(2, {BY_ID, BY_NID}, 40, 10),
    "auth-chain": Expected(1, {BY_ID}, 60),
    "state-at": Expected(2, {BY_ID, "state_groups_pkey", "auth_chains_pkey"}, 10_000),
    "state-keys": Expected(1, {BY_ID, "state_groups_pkey"}, 100),
    "state-types": Expected(1, {BY_ID, "state_groups_pkey"}, 100),
    "current-state": Expected(1, {"current_state_pkey"}, 100, 6),
    "room-info": Expected(1, {"rooms_room_id_key", "current_state_pkey", BY_NID}, 40),
    "space-children": Expected(2, {"rooms_room_id_key", "state_groups_pkey"}, 100),
    "rooms-of": Expected(1, {"memberships_pkey"}, 10, 4),
    "membership": Expected(1, {"rooms_room_id_key", "state_keys_type_nid_state_key_key"}, 10),
    "members": Expected(1, {"current_state_pkey", BY_NID}, 100),
    "member-ids": Expected(1, {"current_state_pkey", "state_keys_pkey"}, 5 * LARGE.members_max),
    "joined-servers": Expected(1, {"visibility_servers_idx"}, 5 * LARGE.members_max),
    "joined-servers-at": Expected(1, {BY_ID, "visibility_servers_idx"}, 5 * LARGE.members_max),
    "users-sharing": Expected(
        1, {"current_state_key_idx", "current_state_pkey", "state_keys_pkey"}, 300_000
    ),
    "sharing-changes": Expected(2, {"memberships_pkey", "state_deltas_pkey"}, 2_000),
    "relations": Expected(1, {BY_ID, BY_RELATION}, 60),
    "relations-indirect": Expected(1, {BY_ID, BY_RELATION}, 800),
    "threads": Expected(5, {"events_thread_idx"}, 1_000, 10),
    "unread": Expected(1, {"memberships_pkey", BY_STREAM}, 300 * LARGE.rooms),
    "aggregations": Expected(2, {BY_RELATION}, 400, 10),
    "client-events": Expected(4, {BY_ID, BY_NID, BY_RELATION}, 500, 10),
    "visible-to-user": Expected(1, {BY_ID, "visibility_pkey"}, 10),
    "visible-to-server": Expected(1, {BY_ID, "visibility_pkey"}, 10),
    "is-resident": Expected(1, {"rooms_room_id_key", "visibility_pkey"}, 10),
}


class CrowdedDatabase(NamedTuple):
    """A crowd's database, the arguments of its queries, and its big tables."""

    dsn: str
    given: QueryArguments
    big_tables: set[str]


def opened(crowd: Crowd, server_dsn: str, template: str, worker: str) -> Iterator[CrowdedDatabase]:
    with asyncio.Runner() as runner:
        databases = AsyncExitStack()
        dsn = runner.run(
            databases.enter_async_context(
                _fresh_database(server_dsn, template, f"{worker}_{crowd.rooms}")
            )
        )
        runner.run(build(dsn, crowd, told=False))
        yield runner.run(_place(dsn, crowd))
        runner.run(databases.aclose())


async def _place(dsn: str, crowd: Crowd) -> CrowdedDatabase:
    driver = await asyncpg.connect(dsn)
    try:
        conn = Connection(driver)
        hall = room_id(crowd.hall)
        event_id = await conn.fetchval(SQL_ROOT, hall)
        if crowd == LARGE:
            await conn.execute(SQL_NAMES, NAMES)
            await conn.execute("VACUUM ANALYZE")
        given = QueryArguments(
            room=hall,
            user=EVERYWHERE,
            event=event_id,
            server=next(
                name for name in crowd.members(crowd.hall) if name.startswith("@r")
            ).partition(":")[2],
            since=await token_behind(conn, BEHIND),
            timestamp=FIRST_MS + DEPTH_MS + STEP_MS * crowd.events // 2,
            limit=LIMIT,
        )
        return CrowdedDatabase(dsn, given, set(await conn.fetchvals(SQL_BIG_TABLES)))
    finally:
        await driver.close()


@pytest.fixture(scope="module")
def large(server_dsn: str, template_name: str, worker_id: str) -> Iterator[CrowdedDatabase]:
    yield from opened(LARGE, server_dsn, template_name, worker_id)


@pytest.fixture(scope="module")
def small(server_dsn: str, template_name: str, worker_id: str) -> Iterator[CrowdedDatabase]:
    yield from opened(SMALL, server_dsn, template_name, worker_id)


async def plans_of(
    place: CrowdedDatabase, name: str, given: QueryArguments, *, generic: bool
) -> list[QueryPlan]:
    async with (
        await Database.open(place.dsn) as database,
        database.transaction(isolation="repeatable_read", readonly=True) as conn,
    ):
        return await (await prepared(database, conn, name, given)).plans(generic=generic)


def told_of(name: str, given: QueryArguments) -> QueryArguments:
    """Whole states of 300 rooms are no plan to look at: the initial sync is of a user in ten."""
    if name in ("initial-sync", "initial-lazy-sync"):
        return replace(given, user=FEW, since=None)
    return given if "since" in QUESTIONS[name].needs else replace(given, since=None)


def test_every_question_is_expected() -> None:
    assert EXPECTED.keys() == QUESTIONS.keys()


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
@pytest.mark.parametrize("name", EXPECTED)
async def test_among_many_events(large: CrowdedDatabase, name: str, generic: bool) -> None:
    expected = EXPECTED[name]
    plans = await plans_of(large, name, told_of(name, large.given), generic=generic)
    assert {
        "events",
        "rooms",
        "state_keys",
        "memberships",
        "current_state",
        "auth_chains",
        "visibility",
    } <= large.big_tables
    assert 1 <= len(plans) <= expected.statements
    assert set().union(*(plan.sequential for plan in plans)) & large.big_tables == set()
    assert expected.indexes <= set().union(*(plan.indexes for plan in plans))
    answered = sum(plan.answer_rows for plan in plans)
    assert answered > 0
    assert sum(plan.rows for plan in plans) <= expected.rows + expected.rows_each * answered


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
@pytest.mark.parametrize("name", ["lazy-sync", "initial-lazy-sync"])
async def test_lazy_members_have_no_plan_that_reads_all_state_keys(
    large: CrowdedDatabase, name: str, generic: bool
) -> None:
    """Also no plan with such a branch that did not run, because no room was returned whole."""
    planned = [
        node
        for plan in await plans_of(large, name, told_of(name, large.given), generic=generic)
        for node in plan.nodes()
    ]
    assert (
        not {node["Relation Name"] for node in planned if node["Node Type"] == "Seq Scan"}
        & large.big_tables
    )


GROWING = {
    "sync",
    "sync-remembered",
    "initial-sync",
    "lazy-sync",
    "initial-lazy-sync",
    "messages-since",
    "rooms-of",
    "users-sharing",
    "sharing-changes",
    "relations",
    "relations-indirect",
    "aggregations",
    "client-events",
    "unread",
    "sliding-sync",
    "threads",
}
"""Queries that read more rows in the large database, for one of three reasons.

In the large one the user is in three times as many rooms, rooms have other events within the
answer, and there more events have relations.
"""


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - GROWING))
async def test_rows_do_not_grow_with_the_database(
    large: CrowdedDatabase, small: CrowdedDatabase, name: str
) -> None:
    plans = [
        await plans_of(place, name, told_of(name, place.given), generic=False)
        for place in (large, small)
    ]
    sums = [sum(plan.rows for plan in of_one) for of_one in plans]
    assert sums[0] <= 1.5 * sums[1] + 20


async def test_a_scan_is_seen(large: CrowdedDatabase) -> None:
    driver = await asyncpg.connect(large.dsn)
    try:
        explaining = ExplainingConnection(driver)
        await explaining.fetchvals("SELECT event_nid FROM events WHERE depth < 0")
        [plan] = explaining.plans
        assert plan.sequential == {"events"} <= large.big_tables
        assert plan.rows_of_tables()["events"] >= 0.99 * EVENTS
    finally:
        await driver.close()
