"""Plans of a page whose position reordered events have crossed.

It uses the indexes of an ordinary page and reads, besides its rows, only the reordered events. The
room has thousands of replies to one event, many of them reordered, and stands among thousands of
other rooms. The plans are generic.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest

from storage import Store
from storage.database.explained import ExplainingConnection, QueryPlan
from storage.ids import EventId, RoomId, UserId
from storage.queries import messages, relations
from storage.queries.pagination.page import BEGINNING, END, Page, PageRange
from storage.streams import PaginationToken
from storage.streams.positions import LARGEST_POSITION
from tests.queries.rooms import ADMIN, LOCAL, deliver, new_room
from tests.queries.test_large_plans import BY_ORDER, BY_RELATION, SQL_NAMES
from tests.queries.test_relations_plans import SQL_MULTIPLY

MANY, MOVES, LIMIT = 3_000, 100, 20
ROWS = 4
"""Most rows that are looked at for each event that the page may hold, and for each that has moved.
"""

SQL_MOVE = """
WITH moved AS (
    SELECT row_number() OVER (ORDER BY e.topological_ordering) AS moves, e.event_nid, e.room_nid
    FROM events e
    WHERE starts_with(e.event_id, $1::text) AND e.topological_ordering % ($2::int / $3::int) = 0
), remembered AS (
    INSERT INTO reordered_events (moves, event_nid, topological_before, room_nid)
    SELECT moves, event_nid, 2, room_nid FROM moved
)
UPDATE rooms r SET moves = (SELECT max(moves) FROM moved) FROM events e
    WHERE e.event_id = $1::text AND r.room_nid = e.room_nid
RETURNING r.moves
"""


class ReorderedRoom(NamedTuple):
    """Return a room in which an event's descendants were reordered, and a position in the middle.

    The position dates from when half of the reorderings were still to come.
    """

    store: Store
    room_id: str
    root_id: str
    middle: PaginationToken
    across: int
    """How many stand above the middle, and stood below it."""


@pytest.fixture
async def moved(store: Store) -> ReorderedRoom:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    reply = room.threaded(LOCAL, root, "reply")
    await deliver(store, room)
    place = (await store.events([reply.event_id]))[reply.event_id]
    async with store.database.connection() as conn:
        await conn.execute(SQL_MULTIPLY, reply.event_id, MANY, MANY)
        moves = await conn.fetchval(SQL_MOVE, reply.event_id, MANY, MOVES)
        await conn.execute(SQL_NAMES, 5_000)
        for table in (
            "events",
            "rooms",
            "reordered_events",
            "visibility",
            "audiences",
            "principals",
            "event_types",
            "erased_users",
        ):
            await conn.execute(f"VACUUM ANALYZE {table}")
    at = (place.topological_ordering or 0) + MANY + MANY // 2
    return ReorderedRoom(
        store,
        room.room_id,
        root.event_id,
        PaginationToken(at, LARGEST_POSITION, moves=moves // 2),
        moves // 2,
    )


async def pages_of(
    moved: ReorderedRoom, question: str, asked: PageRange, *, generic: bool
) -> tuple[list[QueryPlan], Page]:
    """The plans of one page, and the page."""
    ids = RoomId(moved.room_id), EventId(moved.root_id), UserId(LOCAL)
    async with moved.store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        explaining = ExplainingConnection.over(conn, generic=generic)
        if question == "messages":
            return explaining.plans, await messages.messages(
                explaining, ids[0], ids[2], asked, "", rows_max=20_000
            )
        wanted = relations.RelationFilter(
            recurse=question == "recursive", rel_type="m.thread" if question == "thread" else None
        )
        page = await relations.relations(
            explaining, ids[1], ids[2], wanted, asked, deployment="", rows_max=20_000
        )
        return explaining.plans, page


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
@pytest.mark.parametrize(
    "question, index", [("messages", BY_ORDER), ("relations", BY_RELATION), ("thread", BY_RELATION)]
)
async def test_a_page_reads_what_it_answers_with_and_what_has_moved(
    moved: ReorderedRoom, question: str, index: str, generic: bool
) -> None:
    up = (
        PageRange(moved.middle, END, "f", LIMIT),
        PageRange(BEGINNING, moved.middle, "f", 2 * moved.across),
    )
    down = (
        PageRange(moved.middle, BEGINNING, "b", 2 * moved.across),
        PageRange(END, moved.middle, "b", LIMIT),
    )
    for asked in (*up, *down):
        plans, page = await pages_of(moved, question, asked, generic=generic)
        assert len(plans) == 2
        assert plans[0].answer_rows == 0
        assert plans[0].rows <= 10
        across = [
            event
            for event in page.chunk
            if (event.topological_ordering or 0) > moved.middle.topological
        ]
        if asked in down[:1]:
            assert len(across) == moved.across
        assert plans[1].sequential & {"events", "rooms", "reordered_events"} == set()
        assert index in plans[1].indexes
        assert plans[1].rows <= ROWS * (asked.limit + moved.across)


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
async def test_a_walk_over_indirect_relations_reads_no_more_than_an_ordinary_one(
    moved: ReorderedRoom, generic: bool
) -> None:
    asks = PageRange(moved.middle, BEGINNING, "b", LIMIT), PageRange(moved.middle, END, "f", LIMIT)
    for asked in asks:
        plans, page = await pages_of(moved, "recursive", asked, generic=generic)
        assert [plan.answer_rows for plan in plans] == [0, len(page.chunk) + 1]
        assert plans[1].sequential & {"events", "rooms", "reordered_events"} == set()
        fresh = asked._replace(start=replace(moved.middle, moves=2 * moved.across))
        ordinary, _ = await pages_of(moved, "recursive", fresh, generic=generic)
        assert len(ordinary) == 1
        assert plans[1].rows <= ordinary[0].rows + 2 * moved.across
