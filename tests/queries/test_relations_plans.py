"""Plans of the relation queries among thousands of relations to one event.

They use their index and read no more than the rows of the answer.
"""

from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from storage import Store
from storage.ids import EventId
from storage.queries import relations
from storage.queries.pagination.page import BEGINNING, END, PageRange
from storage.streams import PaginationToken
from tests.queries.rooms import ADMIN, LOCAL, deliver, ids, new_room
from tests.queries.test_plans import bound, is_inlined, plan_of

pytestmark = [
    pytest.mark.xdist_group("relations"),
    pytest.mark.asyncio(loop_scope="module"),
]  # filled once

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


def relations_query(
    busy: Busy, requested: PageRange, *, rel_type: str | None = None, rows_max: int | None = None
) -> tuple[Any, ...]:
    """The ordinary statement of a page, with its arguments. ``rows_max``: recursive."""
    values = dict.fromkeys(relations.RELATION_VALUES) | {
        "event_id": busy.root_id,
        "user_id": LOCAL,
        "ignored": [],
        "rel_type": rel_type,
    }
    if rows_max is None:
        return bound(relations.SQL_DIRECT, requested, values)
    levels = {"rows_max": rows_max, "levels": relations.RECURSION_DEPTH}
    return bound(relations.SQL_RECURSIVE, requested, values | levels)


async def test_a_page_reads_what_it_answers_with(busy: Busy) -> None:
    whole = PageRange(END, BEGINNING, "b", 20), PageRange(BEGINNING, END, "f", 20)
    for requested in whole:
        for rel_type, kinds in ((None, 3), ("m.annotation", 1), ("m.replace", 1)):
            query = relations_query(busy, requested, rel_type=rel_type)
            plan = await plan_of(busy.store, *query)
            assert "events_relation_idx" in plan.indexes
            assert plan.event_rows <= (kinds + 1) * 21 + 10
            assert is_inlined(plan)
    middle = PaginationToken(busy.many + busy.many // 2, 0)
    for requested in (PageRange(END, middle, "b", 20), PageRange(middle, END, "f", 20)):
        plan = await plan_of(busy.store, *relations_query(busy, requested, rel_type="m.thread"))
        assert plan.event_rows <= 2 * 21 + 10


async def test_a_walk_stops_at_its_limit(busy: Busy) -> None:
    query = relations_query(busy, PageRange(END, BEGINNING, "b", 20), rows_max=500)
    plan = await plan_of(busy.store, *query)
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
