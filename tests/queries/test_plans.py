"""Plans of the hot queries: index, rows of `events` read, and that shared functions are inlined.

One room has 4,000 messages; no query reads the other. The planner has their statistics. Rows are
counted while the query runs.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from storage import Store
from storage.queries import context, federation, messages
from storage.queries import events as visibility_queries
from storage.queries import timestamp_to_event as timestamps
from storage.queries.filters import ANY_EVENT
from storage.queries.pagination import page as sync_tokens
from storage.queries.pagination.page import BEGINNING, END, PageRange
from storage.queries.pagination.statements import PageStatements, range_values
from storage.queries.sync import rooms, state
from storage.streams import PaginationToken, stream_rows
from storage.streams.positions import LARGEST_POSITION
from storage.visibility import multirange
from tests.queries.rooms import ADMIN, LOCAL, deliver, ids, new_room

pytestmark = [
    pytest.mark.xdist_group("plans"),
    pytest.mark.asyncio(loop_scope="module"),
]  # filled once

MANY = 4_000
SHARED_FUNCTIONS = ("visibility_of", "user_sees", "server_sees", "server_gets", "state_entries")

SQL_MULTIPLY = """
INSERT INTO events
SELECT made.*
FROM events e
CROSS JOIN generate_series(1, $2::int) AS n
CROSS JOIN LATERAL jsonb_populate_record(NULL::events, to_jsonb(e) || jsonb_build_object(
    'event_nid', e.event_nid + 1000000000::bigint * n,
    'event_id', e.event_id || n,
    'stream_ordering', e.stream_ordering + n,
    'topological_ordering', e.topological_ordering + n,
    'origin_server_ts', e.origin_server_ts + n,
    'prev_distance', 1000000000,
    'auth_distance_1', NULL,
    'auth_events', auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2,
        e.auth_distance_3, e.auth_distance_4)
)) AS made
WHERE e.event_id = $1::text
"""

SQL_MOVE_APART = """
WITH pivot AS (
    SELECT topological_ordering, stream_ordering FROM events WHERE event_id = $1::text
), moved AS (
    UPDATE events e
    SET topological_ordering = e.topological_ordering + $2::int,
        stream_ordering = e.stream_ordering + $2::int
    FROM pivot p
    WHERE e.topological_ordering > p.topological_ordering
)
UPDATE audiences a
SET opened_topological = a.opened_topological + $2::int
FROM pivot p
WHERE a.opened_topological >= p.topological_ordering
"""


class Filled(NamedTuple):
    """A store with a large room."""

    store: Store
    room_id: str
    last_event_id: str
    last_stream: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def filled(module_store: Store) -> Filled:
    return await fill(module_store)


async def fill(store: Store) -> Filled:
    room, other = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    last = room.message(ADMIN)
    await deliver(store, other)
    await deliver(store, room)
    position = (await store.events([last.event_id]))[last.event_id].stream_ordering or 0
    async with store.database.connection() as conn:
        await conn.execute(SQL_MULTIPLY, last.event_id, MANY)
        await conn.execute(
            "UPDATE rooms SET last_stream_ordering = $2::bigint WHERE room_id = $1::text",
            room.room_id,
            position + MANY,
        )
        for table in (
            "events",
            "rooms",
            "visibility",
            "principals",
            "memberships",
            "state_groups",
            "current_state",
            "state_deltas",
        ):
            await conn.execute(f"VACUUM ANALYZE {table}")
    return Filled(store, room.room_id, f"{last.event_id}{MANY}", position + MANY)


class MeasuredPlan(NamedTuple):
    """Figures of EXPLAIN ANALYZE."""

    text: str
    indexes: set[str]
    event_rows: int


async def plan_of(store: Store, sql: str, *args: Any) -> MeasuredPlan:
    async with store.database.connection() as conn:
        text = await conn.fetchval("EXPLAIN (ANALYZE, VERBOSE, BUFFERS, FORMAT JSON) " + sql, *args)
    nodes = list(walk(json.loads(text)[0]["Plan"]))
    scans = [node for node in nodes if node.get("Relation Name") == "events"]
    assert not [node for node in scans if node["Node Type"] == "Seq Scan"], text
    rows = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in scans
    )
    return MeasuredPlan(
        text, {node["Index Name"] for node in nodes if "Index Name" in node}, round(rows)
    )


def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from walk(child)


def is_inlined(plan: MeasuredPlan) -> bool:
    return not any(
        f"{name}(" in plan.text or f'"Function Name": "{name}"' in plan.text
        for name in SHARED_FUNCTIONS
    )


WHOLE = (PageRange(END, BEGINNING, "b", 100), PageRange(BEGINNING, END, "f", 100))


def page_query(room_id: str, reader: str, requested: PageRange) -> tuple[Any, ...]:
    """The ordinary statement of a page of `messages`, with its arguments."""
    reads = {"room_id": room_id, "user_id": reader, "ignored": [], **ANY_EVENT.values}
    return bound(messages.SQL_PAGE, requested, reads)


def bound(
    statements: PageStatements, requested: PageRange, values: dict[str, Any]
) -> tuple[Any, ...]:
    """The ordinary statement of a page, with its arguments."""
    statement = statements.ordinary.of(requested.direction)
    values = {**values, **range_values(requested), "moves": LARGEST_POSITION}
    return statement.sql, *statement.bind(values)


async def test_pages(filled: Filled) -> None:
    for whole in WHOLE:
        plan = await plan_of(filled.store, *page_query(filled.room_id, LOCAL, whole))
        assert "events_room_topological_idx" in plan.indexes
        assert plan.event_rows <= 2 * 101 + 10
        assert is_inlined(plan)


@pytest.mark.asyncio(loop_scope="function")
async def test_pages_across_what_is_hidden(store: Store) -> None:
    """The reader was away for all but the ends of a room: hidden events are not read.

    The page has the same events as the filter alone.
    """
    room = new_room(visibility="joined", members=[LOCAL])
    seen = [room.message(ADMIN)]
    room.leave(LOCAL)
    hidden = room.message(ADMIN)
    room.join(LOCAL)
    seen += [room.message(ADMIN) for _ in range(20)]
    await deliver(store, room)
    async with store.database.connection() as conn:
        await conn.execute(SQL_MOVE_APART, hidden.event_id, MANY)
        await conn.execute(SQL_MULTIPLY, hidden.event_id, MANY)
        for table in ("events", "audiences", "rooms"):
            await conn.execute(f"VACUUM ANALYZE {table}")
    for whole in WHOLE:
        plan = await plan_of(store, *page_query(room.room_id, LOCAL, whole))
        assert "events_room_topological_idx" in plan.indexes
        assert plan.event_rows <= 2 * 50 + 4 * multirange.SLACK
    plan = await plan_of(
        store, context.SQL_CONTEXT, seen[1].event_id, LOCAL, 50, 50, [], *ANY_EVENT.arguments, None
    )
    assert plan.event_rows <= 2 * 50 + 4 * multirange.SLACK
    page = await store.messages(room.room_id, LOCAL, limit=100)
    assert set(ids(seen)) <= {event.event_id for event in page.chunk}
    assert page.end is None
    assert not {hidden.event_id, f"{hidden.event_id}1"} & {event.event_id for event in page.chunk}


async def test_pages_beside_a_timeline(filled: Filled) -> None:
    since = filled.last_stream - 500
    start, stop = (
        PaginationToken(LARGEST_POSITION, LARGEST_POSITION, live)
        for live in (filled.last_stream - 100, since)
    )
    query = page_query(filled.room_id, LOCAL, PageRange(start, stop, "b", 400))
    plan = await plan_of(filled.store, *query)
    assert (
        "events_room_topological_idx" in plan.indexes
    )  # what has arrived since by position, here in nearly the same room
    assert plan.event_rows <= 3 * 500 + 10


async def test_what_tokens_of_sync_cover(filled: Filled) -> None:
    last = filled.last_stream
    tokens = ([0, 1], [last - 100, last - 50], [last, last], [0, 1], ["main", "main"], [last, last])
    for room_id, event_id in ((filled.room_id, None), (None, filled.last_event_id)):
        plan = await plan_of(filled.store, sync_tokens.SQL_COVERED, room_id, event_id, *tokens)
        assert "events_room_stream_idx" in plan.indexes
        assert 150 <= plan.event_rows <= 151


async def test_sync(filled: Filled) -> None:
    for since in (None, filled.last_stream - 1000):
        plan = await plan_of(
            filled.store,
            rooms.SQL_ROOMS,
            LOCAL,
            since,
            filled.last_stream,
            False,
            None,
            None,
            None,
            10,
            since or filled.last_stream,
            [],
            [],
            [],
            None,
            None,
            [],
            20_000,
            *ANY_EVENT.arguments,
            False,
        )
        assert "events_room_stream_idx" in plan.indexes
        assert plan.event_rows <= 2 * 2 * 11 + 20
        assert is_inlined(plan)


async def test_states_of_sync(filled: Filled) -> None:
    end = filled.last_stream
    more: tuple[Any, ...] = (False, [], [], False, *ANY_EVENT.arguments, LOCAL)
    both = ([1, 11], [True, False], [None, None], [0, 1], [end, end], [end, end], [True, True])
    plan = await plan_of(filled.store, state.SQL_STATE, *both, *more, [], [], [True, True], [])
    assert plan.event_rows <= 20
    plan = await plan_of(
        filled.store, state.SQL_STATE, *([] for _ in both), *more, [1, 11], [1, 2], [], [None, None]
    )
    assert 2 <= plan.event_rows <= 30


async def test_context_and_nearest(filled: Filled) -> None:
    plan = await plan_of(
        filled.store,
        context.SQL_CONTEXT,
        filled.last_event_id,
        LOCAL,
        50,
        50,
        [],
        *ANY_EVENT.arguments,
        None,
    )
    assert "events_room_topological_idx" in plan.indexes
    assert plan.event_rows <= 2 * 101 + 10
    assert is_inlined(plan)
    plan = await plan_of(
        filled.store, context.SQL_STATE_AT, filled.last_event_id, *ANY_EVENT.arguments
    )
    assert plan.event_rows <= 20
    assert is_inlined(plan)
    for statement in timestamps.SQL_NEAREST:
        plan = await plan_of(
            filled.store, statement.sql, filled.room_id, LOCAL, 1_700_000_000_000, 20_000
        )
        assert "events_out_of_order_idx" in plan.indexes
        assert plan.event_rows <= 40  # sorted by 32 at a time
        assert is_inlined(plan)


async def test_visibility(filled: Filled) -> None:
    for sql, name in (
        (visibility_queries.SQL_VISIBLE_TO_USER, LOCAL),
        (visibility_queries.SQL_VISIBLE_TO_SERVER, "s2.test"),
        (visibility_queries.SQL_VISIBLE_AFTER_LEAVING, "s2.test"),
    ):
        plan = await plan_of(filled.store, sql, name, [filled.last_event_id])
        assert "events_event_id_idx" in plan.indexes
        assert plan.event_rows <= 1
        assert is_inlined(plan)


async def test_walks_over_the_graph(filled: Filled) -> None:
    plan = await plan_of(
        filled.store,
        federation.SQL_BACKFILL,
        filled.room_id,
        [filled.last_event_id],
        100,
        "s2.test",
        20_000,
    )
    assert {"events_event_id_idx", "events_pkey"} <= plan.indexes
    assert plan.event_rows <= 4 * 100 + 10
    assert is_inlined(plan)
    plan = await plan_of(
        filled.store,
        federation.SQL_MISSING,
        filled.room_id,
        [],
        [filled.last_event_id],
        20,
        0,
        "s2.test",
        20_000,
    )
    assert {"events_event_id_idx", "events_pkey"} <= plan.indexes
    assert plan.event_rows <= 5 * 20 + 10
    assert is_inlined(plan)


async def test_a_page_of_the_stream_of_events(filled: Filled) -> None:
    """It reads, and joins, what it gives and no more, however much is left."""
    for writer in (None, "main"):
        plan = await plan_of(
            filled.store,
            stream_rows.SQL_EVENTS_ROWS,
            filled.last_stream - MANY + 10,
            filled.last_stream,
            writer,
            100,
        )
        assert "events_stream_ordering_key" in plan.indexes
        assert plan.event_rows <= 100


async def test_the_comparison_sees_a_scan(filled: Filled) -> None:
    with pytest.raises(AssertionError):
        await plan_of(filled.store, "SELECT count(*) FROM events WHERE depth = 0")
    slow = await plan_of(
        filled.store,
        "SELECT s.* FROM rooms r"
        " CROSS JOIN LATERAL visibility_of(r.room_nid + random()::int, 1) AS s",
    )
    assert not is_inlined(slow)
