"""Plans of the relation queries among thousands of relations to one event.

They use their index and read no more than the rows of the answer.
"""

from typing import NamedTuple

import pytest
import pytest_asyncio

from storage import Store
from storage.ids import EventId
from storage.queries import relations
from storage.streams.positions import LARGEST_POSITION
from tests.queries.rooms import ADMIN, LOCAL, deliver, ids, new_room
from tests.queries.test_plans import EDGE, is_inlined, plan_of

pytestmark = [
    pytest.mark.xdist_group("relations"),
    pytest.mark.asyncio(loop_scope="module"),
]  # filled once

ALL = (LARGEST_POSITION, LARGEST_POSITION, LARGEST_POSITION, 0, 0, LARGEST_POSITION)

SQL_MULTIPLY = """
INSERT INTO events
SELECT made.*
FROM events e
CROSS JOIN generate_series(1, $3::int) AS n
CROSS JOIN LATERAL jsonb_populate_record(NULL::events, to_jsonb(e) || jsonb_build_object(
    'event_nid', e.event_nid + 1000000000::bigint * n,
    'event_id', e.event_id || n,
    'stream_ordering', e.stream_ordering + $2::int + n,
    'topological_ordering', e.topological_ordering + $2::int + n
)) AS made
WHERE e.event_id = $1::text
"""


class Busy(NamedTuple):
    """A room in which an event has thousands of reactions and replies."""

    store: Store
    root_id: str
    plain_ids: list[EventId]
    many: int


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[300, 3_000])
async def busy(module_store: Store, request: pytest.FixtureRequest) -> Busy:
    store, many = module_store, request.param
    room = new_room(seed=many, members=[LOCAL])
    root = room.message(ADMIN)
    plain = [room.message(ADMIN) for _ in range(100)]
    reply, reaction, said = (
        room.threaded(LOCAL, root, "reply"),
        room.react(LOCAL, root),
        room.message(ADMIN),
    )
    room.edit(ADMIN, root, "once")
    await deliver(store, room)
    async with store.database.connection() as conn:
        for place, event in enumerate((reply, reaction, said)):
            await conn.execute(SQL_MULTIPLY, event.event_id, many * (place + 1), many)
        for table in ("events", "rooms", "visibility", "principals", "event_types", "erased_users"):
            await conn.execute(f"VACUUM ANALYZE {table}")
    return Busy(store, root.event_id, ids(plain), many)


async def test_a_page_reads_what_it_answers_with(busy: Busy) -> None:
    for sql in (relations.SQL_BACKWARDS, relations.SQL_FORWARDS):
        for rel_type, kinds in ((None, 3), ("m.annotation", 1), ("m.replace", 1)):
            plan = await plan_of(
                busy.store,
                sql,
                busy.root_id,
                LOCAL,
                [],
                rel_type,
                None,
                *ALL,
                20,
                *EDGE,
                LARGEST_POSITION,
                None,
            )
            assert "events_relation_idx" in plan.indexes
            assert plan.event_rows <= (kinds + 1) * 21 + 10
            assert is_inlined(plan)
    middle = (
        LARGEST_POSITION,
        LARGEST_POSITION,
        LARGEST_POSITION,
        busy.many + busy.many // 2,
        0,
        LARGEST_POSITION,
    )
    for sql in (relations.SQL_BACKWARDS, relations.SQL_FORWARDS):
        plan = await plan_of(
            busy.store,
            sql,
            busy.root_id,
            LOCAL,
            [],
            "m.thread",
            None,
            *middle,
            20,
            *EDGE,
            LARGEST_POSITION,
            None,
        )
        assert plan.event_rows <= 2 * 21 + 10


async def test_a_walk_stops_at_its_limit(busy: Busy) -> None:
    recursive = (*ALL, 20, -1, 500, relations.RECURSION_DEPTH, *EDGE, LARGEST_POSITION, None)
    plan = await plan_of(
        busy.store, relations.SQL_RECURSIVE, busy.root_id, LOCAL, [], None, None, *recursive
    )
    assert "events_relation_idx" in plan.indexes
    assert plan.event_rows <= 2 * 500 + 3 * 21 + 10
    assert is_inlined(plan)


async def test_aggregations_of_a_page(busy: Busy) -> None:
    """Of events that nothing relates to one probe each; a thread is counted event by event."""
    plan = await plan_of(busy.store, relations.SQL_AGGREGATIONS, LOCAL, busy.plain_ids, [], 1_000)
    assert "events_relation_idx" in plan.indexes
    assert plan.event_rows <= 100
    assert is_inlined(plan)
    plan = await plan_of(
        busy.store, relations.SQL_AGGREGATIONS, LOCAL, [*busy.plain_ids, busy.root_id], [], 1_000
    )
    assert plan.event_rows <= 100 + busy.many + 30
    assert is_inlined(plan)
