"""A read touches as many rows in a room of 16,000 events as in one of 1,000, in every state.

The reads are the catalogue, and their siblings: pages from a position, by a filter, of reordered
events, and those of a user of all rooms. Each runs as in a store, by the plan that the session
keeps. The answer bounds the rows that are touched, and an index is named for each.
`STORAGE_PLAN_EVENTS` sets the size of the large room; `make soak` sets a million.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pytest

from benchmarks.crowd import EVERYWHERE
from benchmarks.statistics_states import (
    BY_NAME,
    MEMBER,
    OTHERS,
    BigRoom,
    StatesServer,
    StatisticsState,
)
from storage.database import Connection, Database
from storage.database.deployment import deployment
from storage.ids import EventId, RoomId, UserId
from storage.queries import context, messages, relations, threads
from storage.queries.filters import ANY_EVENT, EventFilter
from storage.queries.pagination.page import END, Direction, between
from storage.store.catalogue import QUESTIONS, QueryArguments, ask, token_behind
from storage.streams import PaginationToken
from tests.plans.chosen import states_of
from tests.plans.recording import PlanRecorder, Touched
from tests.queries.test_large_plans import BY_ID, BY_NID, BY_ORDER, BY_RELATION, BY_STREAM, EXPECTED

pytestmark = [
    pytest.mark.xdist_group("plans-reads"),
    pytest.mark.timeout(600),
]

SMALL: Final = 1_000
LARGE: Final = int(os.environ.get("STORAGE_PLAN_EVENTS", "16000"))
LIMIT: Final = 20
BEHIND: Final = 30
ROWS: Final = 150
"""Rows that a read may touch for what it has only once."""
ROWS_EACH: Final = 10
"""Rows that it may touch for each row of its answers."""
ROWS_FEW: Final = 200
"""Rows by which a statement may touch more: a small table may be read whole, where it is small."""
ROWS_PURGED: Final = 500
"""A purge leaves notes for caches, which a new process reads up to a bound."""
MOVED: Final = 5
THREADS: Final = 1
"""A page of more threads reads chunks of growing size, up to a bound above the small room."""
REFERENCE: Final = "among-small-rooms"
ROWS_MORE: Final[Mapping[str, int]] = {
    "sync of all rooms": 2 * OTHERS,
    "rooms-of of all rooms": 2 * OTHERS,
}
INDEXES: Final[Mapping[str, set[str]]] = {
    **{name: expected.indexes for name, expected in EXPECTED.items()},
    "room-info": {"rooms_room_id_key", BY_NID},  # both indexes of current_state find a few keys
    "back_from_the_middle": {BY_ORDER},
    "forwards_from_the_middle": {BY_ORDER},
    "forwards_from_a_sync": {BY_ORDER, BY_STREAM},
    "messages_only": {BY_ORDER},
    "relations_forwards": {BY_RELATION},
    "context_of_the_last_event": {BY_ID, BY_ORDER},
    "threads_of_the_user": {"events_thread_idx", BY_RELATION},
    "reordered": {BY_ORDER, BY_RELATION},
}
"""Indexes that a read must use."""

SQL_MOVED: Final = """
WITH moved AS (
    INSERT INTO reordered_events (moves, event_nid, topological_before, room_nid)
    SELECT row_number() OVER (ORDER BY e.topological_ordering), e.event_nid, 2, e.room_nid
    FROM (
        SELECT e.event_nid, e.topological_ordering, e.room_nid
        FROM rooms r JOIN events e USING (room_nid)
        WHERE r.room_id = $1::text AND NOT e.outlier
        ORDER BY e.topological_ordering DESC
        LIMIT $2::int
    ) AS e
)
UPDATE rooms SET moves = $2::int WHERE room_id = $1::text
"""
SQL_READ: Final = """
INSERT INTO receipts (stream_id, principal_nid, room_nid, writer_nid, receipt_type, thread_id,
    event_id, data)
SELECT 1, p.principal_nid, r.room_nid, (SELECT min(writer_nid) FROM writers), 'm.read', '',
    $2::text, '{}'
FROM principals p, rooms r
WHERE p.name = $3::text AND r.room_id = $1::text
"""
"""Without a receipt, an unread count reads up to `unread.ROWS_MAX` events."""
SQL_PLACE: Final = """
SELECT topological_ordering, stream_ordering
FROM events
WHERE event_id = $1::text
"""


class PlaceRow(NamedTuple):
    """The position of an event."""

    topological: int
    stream: int


class PlanReader:
    """The reads of the test, each by its name."""

    def __init__(
        self,
        database: Database,
        conn: Connection,
        room: BigRoom,
        given: QueryArguments,
        deployment: str,
    ) -> None:
        self.database = database
        self.conn = conn
        self.deployment = deployment
        self.room = room
        self.given = given

    @property
    def ids(self) -> tuple[RoomId, UserId]:
        return RoomId(self.room.room_id), UserId(MEMBER)

    async def token(self, *, moves: int = 0) -> str:
        place = await self.conn.fetchrow(SQL_PLACE, self.room.middle_id, row=PlaceRow)
        assert place is not None
        return PaginationToken(*place, moves=moves).print(self.deployment)

    async def page(
        self,
        direction: Direction,
        start: str | None = None,
        wanted: EventFilter = ANY_EVENT,
    ) -> None:
        page = await messages.messages(
            self.conn,
            *self.ids,
            between(start, None, direction, LIMIT, self.deployment),
            self.deployment,
            rows_max=20_000,
            event_filter=wanted,
        )
        assert page.chunk

    async def related(self, direction: Direction, *, recurse: bool, moves: int = 0) -> None:
        await relations.relations(
            self.conn,
            EventId(self.room.root_id),
            UserId(MEMBER),
            relations.RelationFilter(recurse=recurse),
            between(await self.token(moves=moves), None, direction, LIMIT, self.deployment),
            deployment=self.deployment,
            rows_max=20_000,
        )

    async def back_from_the_middle(self) -> None:
        await self.page("b", await self.token())

    async def forwards_from_the_middle(self) -> None:
        await self.page("f", await self.token())

    async def forwards_from_a_sync(self) -> None:
        await self.page("f", self.given.since)

    async def messages_only(self) -> None:
        await self.page("b", wanted=EventFilter(types=("m.room.message",)))

    async def reordered(self) -> None:
        token = await self.token(moves=1)
        await self.page("b", token)
        await self.page("f", token)
        for direction in ("b", "f"):
            for recurse in (False, True):
                await self.related(direction, recurse=recurse, moves=1)

    async def relations_forwards(self) -> None:
        await self.related("f", recurse=False)

    async def context_of_the_last_event(self) -> None:
        ids = EventId(str(self.room.pen.tip)), UserId(MEMBER)
        deployment = self.deployment
        await context.context(self.conn, *ids, limit=LIMIT, deployment=deployment)

    async def threads_of_the_user(self) -> None:
        request = threads.ThreadsRequest(
            room_id=self.ids[0],
            user_id=self.ids[1],
            participated=True,
            start=END,
            limit=THREADS,
            rows_max=20_000,
        )
        await threads.threads(self.conn, request, self.deployment)


Read = Callable[[PlanReader], Awaitable[object]]


def catalogued(name: str, **changes: Any) -> Read:
    async def read(reader: PlanReader) -> object:
        given = replace(reader.given, **changes)
        needs = QUESTIONS[name].needs
        return await ask(
            reader.database,
            reader.conn,
            name,
            given if "since" in needs else replace(given, since=None),
        )

    return read


READS: Final[Mapping[str, Read]] = {
    **{name: catalogued(name) for name in QUESTIONS},
    "threads": catalogued("threads", limit=THREADS),
    **{f"{name} of all rooms": catalogued(name, user=EVERYWHERE) for name in ("sync", "rooms-of")},
    **{
        read.__name__: read
        for read in (
            PlanReader.back_from_the_middle,
            PlanReader.forwards_from_the_middle,
            PlanReader.forwards_from_a_sync,
            PlanReader.messages_only,
            PlanReader.relations_forwards,
            PlanReader.context_of_the_last_event,
            PlanReader.threads_of_the_user,
            PlanReader.reordered,
        )
    },
}


async def arguments(conn: Connection, room: BigRoom) -> QueryArguments:
    return QueryArguments(
        room=room.room_id,
        user=MEMBER,
        event=room.root_id,
        server="h0.test",
        since=await token_behind(conn, BEHIND),
        timestamp=room.middle_ts,
        limit=LIMIT,
    )


class TouchedByRead(NamedTuple):
    """What a read touched, the indexes that it used, and the rows of its answers."""

    touched: Touched
    indexes: set[str]
    answered: int


def is_large(index: str, state: StatisticsState) -> bool:
    """Return whether the index is worth its use: any index of a table of a few rows is as good."""
    return state.others > 0 or index.startswith("events_")


async def read_all(
    states: StatesServer, recorder: PlanRecorder, name: str, events: int
) -> AsyncIterator[tuple[str, TouchedByRead]]:
    """Yield what each read touches. Its transaction is undone."""
    room = await states.create(BY_NAME[name], events)
    async with await Database.open(room.dsn) as database, database.connection() as conn:
        given, found = await arguments(conn, room), await deployment(conn)
        assert found is not None
        for what, read in READS.items():
            await conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await conn.execute(SQL_READ, room.room_id, room.root_id, MEMBER)
            if read is PlanReader.reordered:
                await conn.execute(SQL_MOVED, room.room_id, MOVED)
            with recorder.recording() as plans:
                await read(PlanReader(database, conn, room, given, found.deployment_id))
            await conn.execute("ROLLBACK")
            indexes = set[str]().union(*(plan.indexes for plan in plans))
            answered = sum(plan.answer_rows for plan in plans)
            yield what, TouchedByRead(Touched.of(plans), indexes, answered)
    await states.drop(room)


@pytest.fixture(scope="module")
def in_small_room() -> dict[str, TouchedByRead]:
    """What each read touches in the small room, with good statistics: the first test fills it."""
    return {}


@pytest.mark.parametrize("name", states_of(BY_NAME))
async def test_a_read_does_not_grow_with_the_room(
    states: StatesServer, recorder: PlanRecorder, in_small_room: dict[str, TouchedByRead], name: str
) -> None:
    if not in_small_room:
        in_small_room |= {
            what: found async for what, found in read_all(states, recorder, REFERENCE, SMALL)
        }
    state, wrong = BY_NAME[name], dict[str, str]()
    purged = ROWS_PURGED if state.purged else 0
    async for what, found in read_all(states, recorder, name, LARGE):
        touched = found.touched.rows_only() if state.purged else found.touched
        wrong.update(touched.grown(in_small_room[what].touched, what, rows_more=ROWS_FEW + purged))
        rows = sum(one[0] for one in found.touched.values())
        if rows > ROWS + ROWS_EACH * found.answered + ROWS_MORE.get(what, 0) + purged:
            wrong[f"{what}: rows"] = f"{rows} for {found.answered}"
        named = {one for one in INDEXES.get(what, ()) if is_large(one, state)}
        if lacking := named - found.indexes:
            wrong[f"{what}: indexes"] = f"{lacking} are not among {found.indexes}"
        if not found.answered:
            wrong[f"{what}: answers"] = "none"
    assert not wrong, "\n".join(f"{what}: {found}" for what, found in wrong.items())


async def test_a_plan_that_reads_the_room_is_found(
    states: StatesServer, recorder: PlanRecorder
) -> None:
    """Without the settings of the session, a page reads the whole room."""
    room = await states.create(BY_NAME["never-analysed"], LARGE)
    async with await Database.open(room.dsn) as database, database.connection() as conn:
        given = await arguments(conn, room)
        touched = []
        for value in ("off", "on"):
            await conn.execute(f"SET enable_bitmapscan = {value}; SET cpu_tuple_cost = 0.01")
            await conn.execute("DISCARD PLANS")
            await conn.execute("SET cpu_index_tuple_cost = 0.005; SET random_page_cost = 1.1")
            with recorder.recording() as plans:
                await ask(database, conn, "messages", given)
            touched.append(Touched.of(plans))
    await states.drop(room)
    assert touched[1].grown(touched[0], "messages")
