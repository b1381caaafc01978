"""The event nearest to a time, and context, among many hidden events: reads stay bounded."""

from typing import Any, LiteralString

import pytest

import storage
from storage import Store
from storage.errors import UnknownRoom
from storage.ids import RoomId, UserId
from storage.queries import context
from storage.queries import timestamp_to_event as timestamps
from storage.queries.filters import ANY_EVENT
from storage.queries.pagination.page import Direction
from storage.testing import BuiltEvent, RoomBuilder
from storage.visibility import multirange
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, REMOTE, append, deliver, ids, new_room
from tests.queries.test_plans import plan_of

HIDDEN = 14 * multirange.SLACK
DIRECTIONS: list[tuple[Direction, int]] = [("f", 1), ("b", -1)]
ROWS = 2 * multirange.SLACK
SQL_FETCHED: LiteralString = """
SELECT idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'events'
"""


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
        for statement in (*timestamps.SQL_NEAREST, *timestamps.SQL_BEYOND):
            plan = await plan_of(store, statement.sql, room.room_id, LOCAL, time, ROWS)
            assert plan.event_rows <= 4 * ROWS + 2 * multirange.SLACK, statement.sql


@pytest.mark.parametrize("visibility", ["joined", "invited", "shared", "world_readable"])
async def test_for_a_server_it_is_the_nearest_that_it_may_have(
    store: Store, visibility: str, statements: StatementLog
) -> None:
    """Compared with `visible_to_server`, one event at a time."""
    room = new_room(visibility=visibility)
    for _ in range(2):
        room.message(ADMIN, "before")
        room.join(REMOTE)
        room.message(REMOTE, "inside", ts=room.events[-1].json["origin_server_ts"] - 2_500)
        room.leave(REMOTE)
    room.message(ADMIN, "after")
    await deliver(store, room)
    times = {event.event_id: event.json["origin_server_ts"] for event in room.events}
    for server in ("s1.test", "s2.test", "s3.test", None):
        allowed = (
            set(times)
            if server is None
            else await store.visible_to_server(server, ids(room.events))
        )
        for time in range(min(times.values()) - 500, max(times.values()) + 1_000, 500):
            for direction, sign in DIRECTIONS:
                near = [sign * (times[one] - time) for one in allowed]
                expected = min((one for one in near if one >= 0), default=None)
                found = await store.timestamp_to_event(
                    room.room_id,
                    time,
                    direction,
                    server_name=server,
                )
                assert (found is None) is (expected is None), (server, time, direction)
                if found is not None:
                    assert found.event_id in allowed
                    assert sign * (times[found.event_id] - time) == expected
    statements.take()
    await store.timestamp_to_event(room.room_id, 10**15, "b", server_name="s1.test")
    assert len(statements.take()) == 1


async def test_for_a_server_no_more_is_read_than_the_limit(store: Store) -> None:
    room, _, middle, _ = await away(store)
    time = middle.json["origin_server_ts"]
    for statement in timestamps.SQL_NEAREST_OF_SERVER:
        for server in ("s2.test", None):
            plan = await plan_of(store, statement.sql, room.room_id, server, time, 20)
            assert plan.event_rows <= 22
            assert "events_out_of_order_idx" in plan.indexes


async def test_late_events_between_two_in_order_are_not_read(store: Store) -> None:
    """As where a bridge brings old messages: the search goes around them, in both directions."""
    room = new_room(members=[LOCAL])
    first = room.message(ADMIN, "before")
    begun = first.json["origin_server_ts"]
    for number in range(600):
        room.message(ADMIN, "old", ts=begun - 10**9 + number)
    last = room.message(ADMIN, "after")
    await deliver(store, room)
    async with store.database.connection() as conn:
        await conn.execute("VACUUM ANALYZE events")
    ended, directions = last.json["origin_server_ts"], {"f": last, "b": first}
    user, middle = UserId(LOCAL), (begun + ended) // 2
    async with store.database.transaction(readonly=True) as conn:
        for direction, _ in DIRECTIONS:
            before = await conn.fetchval(SQL_FETCHED)
            found = await timestamps.event_near(
                conn, room.room_id, user, middle, direction, rows_max=20_000
            )
            assert found is not None
            assert found.event_id == directions[direction].event_id
            assert await conn.fetchval(SQL_FETCHED) - before < 100


@pytest.mark.parametrize("ts", [-(2**63), 2**63 - 1])
async def test_the_first_and_the_last_time_that_an_event_can_claim(store: Store, ts: int) -> None:
    room = RoomBuilder("3")
    room.start(LOCAL)
    at_the_end = room.message(LOCAL, "at the end of time", ts=ts)
    await deliver(store, room)
    for direction, _ in DIRECTIONS:
        found = await store.event_near(room.room_id, UserId(LOCAL), ts, direction)
        assert found is not None
        assert found.event_id == at_the_end.event_id


async def test_for_a_server_refused_events_are_passed_over(store: Store) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    said = room.message(LOCAL, "kept")
    late = room.fork(1)[0]
    room.ban(ADMIN, REMOTE)
    await deliver(store, room)
    refused = late.message(REMOTE, "too late", ts=10**13)
    assert await append(store, refused) == ["soft_failed"]
    found = await store.timestamp_to_event(room.room_id, 10**14, "b", server_name="s2.test")
    assert found is not None
    assert found.event_id not in (refused.event_id, said.event_id)
    with pytest.raises(UnknownRoom):
        await store.timestamp_to_event(RoomId("!nowhere:s1.test"), 5, "b", server_name="s2.test")


async def test_for_a_server_an_erased_sender_is_withheld(store: Store) -> None:
    room = new_room(visibility="shared", members=[LOCAL])
    said = room.message(LOCAL, "secret")
    room.join(REMOTE)
    await deliver(store, room)
    await store.erase_user(LOCAL)
    at = said.json["origin_server_ts"]
    for server, body in (("s2.test", None), ("s1.test", "secret"), (None, "secret")):
        found = await store.timestamp_to_event(room.room_id, at, "f", server_name=server)
        assert found is not None
        assert (found.event_id, found.content.get("body")) == (said.event_id, body)
        assert (b"secret" in found.raw) is (body is not None)


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
            store,
            context.SQL_CONTEXT,
            target.event_id,
            LOCAL,
            20,
            20,
            [],
            *ANY_EVENT.arguments,
            None,
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
