"""The rows that the reads of storage.queries.inspect read in a large room, by their plans.

The room has 30,000 messages. Each read has a bound that does not depend on that number.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import pytest

from storage import Store, UserId
from storage.database.columns import AUTH_NIDS
from storage.database.connection import Connection
from storage.database.explained import ExplainingConnection
from storage.database.placeholders import compose
from storage.ids import EventId, RoomId
from storage.queries.explain_visibility import explain_visibility
from storage.queries.inspect import lines, resolution, rooms
from storage.queries.inspect.resolution import resolution_at, resolution_now
from storage.testing import RoomBuilder
from tests.maintenance.rooms import SERVER
from tests.postgres import no_autovacuum

pytestmark = pytest.mark.xdist_group("inspector_plans")

MANY = 30_000
SQL_MULTIPLY = compose(
    """
INSERT INTO events
SELECT (copy.event).*
FROM (
    SELECT jsonb_populate_record(e, jsonb_build_object(
        'event_nid', e.event_nid + 1000000000::bigint * n,
        'event_id', e.event_id || n,
        'stream_ordering', e.stream_ordering + n,
        'topological_ordering', e.topological_ordering + n,
        'prev_distance', NULL, 'auth_distance_1', NULL, 'auth_distance_2', NULL,
        'auth_distance_3', NULL, 'auth_distance_4', NULL,
        'auth_events', :auth_nids.call(e),
        'prev_events', jsonb_build_array(CASE WHEN n = 1 THEN e.event_nid
            ELSE e.event_nid + 1000000000::bigint * (n - 1) END)
    )) AS event
    FROM events e
    CROSS JOIN generate_series(1, $2::int) AS n
    WHERE e.event_id = $1::text
    OFFSET 0
) AS copy
""",
    AUTH_NIDS,
).sql
ADMIN, NEVER = UserId(f"@admin:{SERVER}"), UserId(f"@never:{SERVER}")
Read = Callable[[Connection], Awaitable[object]]


class ReadBound(NamedTuple):
    """The most statements, and the most rows that they read from tables."""

    statements: int
    rows: int


async def plans(store: Store, read: Read) -> ReadBound:
    async def explained(conn: Connection) -> ReadBound:
        explaining = ExplainingConnection.over(conn)
        await read(explaining)
        assert not [plan.sql for plan in explaining.plans if "events" in plan.sequential], (
            explaining.plans
        )
        return ReadBound(len(explaining.plans), sum(plan.rows for plan in explaining.plans))

    return await store.reads.run(explained, snapshot=True)


class LargeRoomIds(NamedTuple):
    """The room, its merge, an early event, and one in the middle."""

    room: RoomId
    merge: EventId
    early: EventId
    middle: EventId


async def large_room(store: Store) -> LargeRoomIds:
    """Make the room; the planner has its statistics."""
    await no_autovacuum(store.database)
    room = RoomBuilder("11", seed=1)
    room.start(ADMIN)
    left, right = room.fork(2)
    left.topic(ADMIN, "one")
    right.topic(ADMIN, "two")
    room.merge(left, right)
    merge = room.message(ADMIN)
    early = room.events[5].event_id
    await store.append(room.pdus)
    async with store.database.connection() as conn:
        await conn.execute(SQL_MULTIPLY, merge.event_id, MANY)
        await conn.execute(
            "UPDATE rooms SET max_topological_ordering = max_topological_ordering + $1::int,"
            " last_stream_ordering = (SELECT max(stream_ordering) FROM events),"
            " forward_extremities = ARRAY[(SELECT event_nid FROM events"
            " ORDER BY stream_ordering DESC NULLS LAST LIMIT 1)]",
            MANY,
        )
        for table in ("events", "rooms", "state_groups", "visibility", "current_state"):
            await conn.execute(f"VACUUM ANALYZE {table}")
    merge_id = merge.event_id
    return LargeRoomIds(room.room_id, merge_id, early, EventId(f"{merge_id}{MANY // 2}"))


def reads_of(ids: LargeRoomIds, weeks: list[int]) -> dict[str, tuple[Read, ReadBound]]:
    """Return each read with its bound."""
    room_id, merge_id, early, last = ids
    visible = partial(explain_visibility, event_id=early)
    return {
        "window": (partial(lines.window, room_id=room_id), ReadBound(1, 500)),
        "jump": (
            partial(lines.window, room_id=room_id, position=(MANY // 2, 0)),
            ReadBound(1, 500),
        ),
        "line": (partial(lines.lines_by_id, event_ids=[last]), ReadBound(1, 10)),
        "outliers": (partial(lines.outliers, room_id=room_id), ReadBound(2, 10)),
        "merges": (partial(lines.merges, room_id=room_id), ReadBound(1, 2_100)),
        "edges": (partial(lines.edges, event_id=last), ReadBound(4, 2_100)),
        "early edges": (partial(lines.edges, event_id=early), ReadBound(4, 2_100)),
        "path": (partial(resolution.state_path, state_group=1), ReadBound(1, 30)),
        "groups": (partial(resolution.groups_of, event_id=last), ReadBound(1, 2)),
        "history": (partial(lines.key_history, room_id=room_id), ReadBound(1, 100)),
        "readers": (partial(lines.readers, event_id=last), ReadBound(1, 20)),
        "audiences": (
            partial(lines.audience_ranges, reader=ADMIN, room_ids=[room_id]),
            ReadBound(1, 20),
        ),
        "recent": (rooms.recent_rooms, ReadBound(1, 7_000)),
        "by id": (rooms.rooms_after, ReadBound(1, 2_000)),
        "largest": (partial(rooms.largest_rooms, size="depth"), ReadBound(1, 2_000)),
        "positions": (partial(rooms.positions_at, times_ms=[0, 2**60]), ReadBound(1, 600)),
        "growth": (partial(rooms.room_growth, first=1, end=MANY), ReadBound(1, 21_000)),
        "weeks": (
            partial(rooms.room_weeks, room_id=room_id, boundaries=weeks, limit=500),
            ReadBound(1, 510),
        ),
        "events": (partial(rooms.events_called, event_id=merge_id), ReadBound(1, 1)),
        "rooms": (partial(rooms.rooms_like, beginning="!"), ReadBound(1, 30)),
        "users": (partial(rooms.users_like, beginning="@a"), ReadBound(1, 30)),
        "alias": (partial(rooms.rooms_by_alias, alias="#a:b"), ReadBound(1, 30)),
        # these also read the connections of the server, which other tests share
        "writers": (rooms.writers, ReadBound(1, 1_000)),
        "running": (rooms.running, ReadBound(1, 1_000)),
        "resolution": (partial(resolution_at, event_id=merge_id), ReadBound(15, 400)),
        "current": (partial(resolution_now, room_id=room_id), ReadBound(3, 20)),
        "visible": (
            partial(visible, reader=ADMIN),
            ReadBound(10, 200),
        ),
        "hidden": (
            partial(visible, reader=NEVER),
            ReadBound(10, 20_100),
        ),
        "server": (
            partial(visible, reader="s9.test"),
            ReadBound(10, 20_100),
        ),
    }


async def test_no_read_grows_with_the_room(store: Store) -> None:
    ids = await large_room(store)
    weeks = await store.reads.run(lambda conn: rooms.positions_at(conn, [0] * 9))
    over = {}
    for name, (read, bound) in reads_of(ids, weeks).items():
        used = await plans(store, read)
        if used.statements > bound.statements or used.rows > bound.rows:
            over[name] = used, bound
    assert over == {}
