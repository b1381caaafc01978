"""The event nearest to a time, and context, among many hidden events: reads stay bounded."""

from typing import Any, LiteralString

import storage
from storage import Store
from storage.queries import context
from storage.queries import timestamp_to_event as timestamps
from storage.queries.filters import ANY_EVENT
from storage.testing import BuiltEvent, RoomBuilder
from storage.visibility import audience_ranges
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, deliver, new_room
from tests.queries.test_plans import plan_of

HIDDEN = 14 * audience_ranges.SLACK
ROWS = 2 * audience_ranges.SLACK


async def away(store: Store) -> tuple[RoomBuilder, BuiltEvent, BuiltEvent, BuiltEvent]:
    """Return a room that a user left and joined again much later, and three of its events.

    They are the last visible one, the middle of the hidden part, and the first visible one again.
    """
    room = new_room(visibility="joined", members=[LOCAL])
    room.message(ADMIN, "seen")
    last = room.leave(LOCAL)
    hidden = [room.message(ADMIN, "hidden") for _ in range(HIDDEN)]
    back = room.join(LOCAL)
    room.message(ADMIN, "seen again")
    await deliver(store, room)
    async with store.database.connection() as conn:
        await conn.execute("VACUUM ANALYZE events")
    return room, last, hidden[HIDDEN // 2], back


async def test_across_a_long_absence(dsn: str) -> None:
    async with storage.open(
        dsn, server_name="s1.test", config=storage.Config(traversal_rows_max=ROWS)
    ) as store:
        room, last, middle, back = await away(store)
        time = middle.json["origin_server_ts"]
        after, before = (
            await store.event_near(room.room_id, LOCAL, time, "f"),
            await store.event_near(room.room_id, LOCAL, time, "b"),
        )
        assert after is not None
        assert before is not None
        assert (after.event_id, before.event_id) == (back.event_id, last.event_id)
        sqls: list[LiteralString] = [
            timestamps.SQL_AT_OR_AFTER,
            timestamps.SQL_BEYOND_AFTER,
            timestamps.SQL_AT_OR_BEFORE,
            timestamps.SQL_BEYOND_BEFORE,
        ]
        for sql in sqls:
            plan = await plan_of(store, sql, room.room_id, LOCAL, time, ROWS)
            assert plan.event_rows <= 4 * ROWS + 2 * audience_ranges.SLACK, sql


async def test_without_the_limit_it_is_the_same(store: Store) -> None:
    room, last, middle, back = await away(store)
    time = middle.json["origin_server_ts"]
    after, before = (
        await store.event_near(room.room_id, LOCAL, time, "f"),
        await store.event_near(room.room_id, LOCAL, time, "b"),
    )
    assert after is not None
    assert before is not None
    assert (after.event_id, before.event_id) == (back.event_id, last.event_id)


async def test_context_at_the_edge_of_an_absence(store: Store) -> None:
    _, last, _, back = await away(store)
    for target in (last, back):
        plan = await plan_of(
            store, context.SQL_CONTEXT, target.event_id, LOCAL, 20, 20, [], *ANY_EVENT.arguments
        )
        assert plan.event_rows < HIDDEN / 2
    found = await store.context(last.event_id, LOCAL, limit=4)
    assert found.events_after[0].event_id == back.event_id


async def test_statements_with_nothing_cached(dsn: str) -> None:
    """Each question by a store that was opened for it: how many statements it sends at most."""
    room = new_room(members=[LOCAL])
    room.message(ADMIN)
    async with storage.open(dsn, server_name="s1.test") as store:
        await deliver(store, room)
    last = room.events[-1].event_id
    questions: list[tuple[int, Any]] = [
        (2, lambda store: store.messages(room.room_id, LOCAL)),
        (2, lambda store: store.messages(room.room_id, LOCAL, direction="f", aggregations=True)),
        (3, lambda store: store.context(last, LOCAL)),
        (3, lambda store: store.context(last, LOCAL, aggregations=True)),
        (3, lambda store: store.event_near(room.room_id, LOCAL, 0, "b")),
        (2, lambda store: store.backfill(room.room_id, [last], 100, server_name="s2.test")),
        (2, lambda store: store.missing_events(room.room_id, [], [last], server_name="s2.test")),
        (2, lambda store: store.event_auth(last)),
        (2, lambda store: store.state_ids(last)),
        (2, lambda store: store.auth_chain_ids([last])),
        (2, lambda store: store.gaps(room.room_id)),
    ]
    for most, ask in questions:
        statements = StatementLog()
        async with storage.open(dsn, server_name="s1.test", observer=statements) as store:
            statements.take()
            await ask(store)
            assert 1 <= len(statements.take()) <= most
