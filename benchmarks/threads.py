"""The threads of a room, by their number: the first page, a later one, and those of one user.

Each root has three replies, spread over the history, so a later page meets many old replies of
threads that were on earlier pages. The user has sent every tenth root. Roots and replies are copies
of one of each, inserted into the table directly.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final, LiteralString

import storage
from benchmarks.harness import Bench, Trips, timed
from benchmarks.relations import encode_all, store_plainly
from storage import Store
from storage.ids import RoomId
from storage.testing import BuiltEvent, RoomBuilder

SIZES: Final = (1_000, 10_000, 100_000)
QUICK_SIZES: Final = (100, 500)
BATCH: Final = 5_000
SERVER: Final = "s1.test"

SQL_ROOTS: Final[LiteralString] = """
INSERT INTO events
SELECT made.*
FROM events e
CROSS JOIN generate_series($3::int + 1, $3::int + $4::int) AS n
CROSS JOIN LATERAL jsonb_populate_record(e, jsonb_build_object(
    'event_nid', e.event_nid + 1000000000::bigint * n,
    'event_id', e.event_id || n,
    'stream_ordering', e.stream_ordering + 1000 + n,
    'topological_ordering', e.topological_ordering + 1000 + n,
    'sender_nid', CASE WHEN n % 10 = 0
        THEN (SELECT principal_nid FROM principals WHERE name = $2::text) ELSE e.sender_nid END
)) AS made
WHERE e.event_id = $1::text
"""

SQL_REPLIES: Final[LiteralString] = """
INSERT INTO events
SELECT made.*
FROM events e
CROSS JOIN generate_series($4::int + 1, $4::int + $5::int) AS n
CROSS JOIN generate_series(0, 2) AS reply
CROSS JOIN LATERAL (
    -- each place once: 7919 divides none of the sizes
    SELECT 1000000 + (n + reply * $2::bigint) * 7919 % (3 * $2::bigint) AS place
) AS at
CROSS JOIN LATERAL jsonb_populate_record(e, jsonb_build_object(
    'event_nid', e.event_nid + 1000000000::bigint * (3 * n + reply),
    'event_id', e.event_id || '-' || n || '-' || reply,
    'stream_ordering', at.place,
    'topological_ordering', at.place,
    'relates_to', relation_key($3::text || n),
    'json', convert_to(replace(convert_from(e.json, 'UTF8'), $3::text, $3::text || n), 'UTF8')
)) AS made
WHERE e.event_id = $1::text
"""

SQL_COST: Final[LiteralString] = """
SELECT (pg_relation_size('events_thread_idx')
    + pg_relation_size('events_related_stream_idx'))::float8 / count(*) AS index_bytes
FROM events
WHERE rel_type_nid = 22
"""

Call = Callable[[], Awaitable[Any]]


async def run(bench: Bench) -> None:
    """Measure each size."""
    for many in QUICK_SIZES if bench.quick else SIZES:
        bench.results[str(many)] = await _measure(bench, many, rounds=bench.size(200, 5))


async def _measure(bench: Bench, many: int, rounds: int) -> dict[str, Any]:
    room = RoomBuilder("11", seed=1, sign=False)
    admin, user, stranger = (room.user(number, SERVER) for number in (1, 2, 3))
    room.start(admin)
    room.join(user)
    room.join(stranger)
    root = room.message(admin)
    reply = room.threaded(admin, root, "reply")
    trips = Trips()
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER, observer=trips) as store,
    ):
        trips.opened()
        await store.append(room.pdus)
        await _fill(store, root, reply, many, user)
        results: dict[str, Any] = {}
        for name, call in (await _calls(store, room.room_id, (user, stranger), many)).items():
            results[name] = await timed(call, trips, rounds, seconds_max=10)
        async with store.database.connection() as conn:
            results["index_bytes"] = await conn.fetchval(SQL_COST)
        return results


async def _fill(store: Store, root: BuiltEvent, reply: BuiltEvent, many: int, user: str) -> None:
    """Insert the threads, and analyse the tables for the planner."""
    async with store.database.connection() as conn:
        await store_plainly(conn, root.event_id, reply.event_id)
        for after in range(0, many, BATCH):
            batch = after, min(BATCH, many - after)
            await conn.execute(SQL_ROOTS, root.event_id, user, *batch)
            await conn.execute(SQL_REPLIES, reply.event_id, many, root.event_id, *batch)
        await encode_all(conn)
        await conn.execute("VACUUM ANALYZE")


async def _calls(
    store: Store, room_id: RoomId, users: tuple[str, str], many: int
) -> dict[str, Call]:
    user, stranger = users
    middle = None
    for _ in range(many // 20 // 2 // 5):
        middle = (await store.threads(room_id, user, from_=middle, limit=100)).end
    return {
        "the first 20": lambda: store.threads(room_id, user),
        "20 from the middle": lambda: store.threads(room_id, user, from_=middle),
        "20 with the user": lambda: store.threads(room_id, user, include="participated"),
        "none with the user": lambda: store.threads(room_id, stranger, include="participated"),
    }
