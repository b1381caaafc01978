"""Reads of the members of a room with 50,000: half of them local, half of 1,000 other servers.

The members are inserted into the tables directly, all with the member event of one user. Other
rooms have ten times as many names, so that no read can depend on the size of the table of names.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, LiteralString

import storage
from benchmarks.harness import Bench, Trips, percentiles, show
from storage import Store
from storage.ids import RoomId, UserId
from storage.testing import RoomBuilder

MEMBERS: Final = 50_000
QUICK_MEMBERS: Final = 500
SERVERS: Final = 1_000
SERVER: Final = "s1.test"

SQL_FILL: Final[LiteralString] = """
WITH
sample AS (  -- a user of another server, and a local one
    SELECT c.room_nid, c.event_nid, v.audiences, k.state_key AS name
    FROM rooms r
    JOIN current_state c USING (room_nid)
    JOIN state_keys k ON k.state_key_nid = c.state_key_nid AND k.type_nid = 2
    JOIN principals p ON p.name = split_part(k.state_key, ':', 2)
    JOIN visibility v ON v.room_nid = r.room_nid AND v.principal_nid = p.principal_nid
    WHERE r.room_id = $1::text AND k.state_key = $4::text
),
member AS (
    SELECT n, '@a.user.with.a.name' || n || ':' || CASE WHEN n % 2 = 0 THEN 's1.test'
        ELSE 'server' || n / 2 % $3::int || '.example.org' END AS name
    FROM generate_series(1, $2::int) AS n
),
key AS (  -- with gaps: other keys of the same block belong to other rooms
    INSERT INTO state_keys (state_key_nid, type_nid, state_key)
    SELECT 1000000 + 3 * n, 2, name FROM member
),
elsewhere AS (
    INSERT INTO state_keys (state_key_nid, type_nid, state_key)
    SELECT 1000001 + 3 * n, 2, '@somebody.elsewhere' || n || ':server.example.org'
    FROM generate_series(1, 10 * $2::int) AS n
),
principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT 1000000 + n, name FROM member WHERE n % 2 = 0
    UNION ALL
    SELECT 100000 + n, 'server' || n || '.example.org' FROM generate_series(0, $3::int - 1) AS n
),
visible AS (
    INSERT INTO visibility (room_nid, principal_nid, joined_count, invited_count, audiences,
        last_join_topological)
    SELECT room_nid, 1000000 + n, 1, 0, audiences, 3 FROM sample, member WHERE n % 2 = 0
    UNION ALL
    SELECT room_nid, 100000 + n, 25, 0, audiences, NULL
    FROM sample, generate_series(0, $3::int - 1) AS n
)
INSERT INTO current_state (room_nid, state_key_nid, event_nid, membership)
SELECT room_nid, 1000000 + 3 * n, event_nid, 5 FROM sample, member
"""

Call = Callable[[], Awaitable[Any]]


async def run(bench: Bench) -> None:
    """Measure each call in turns."""
    room = RoomBuilder("11", seed=1, sign=False)
    admin, other = room.user(1, SERVER), room.user(2, "s2.test")
    room.start(admin)
    room.join(other)
    last = room.message(admin)
    trips = Trips()
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER, observer=trips) as store,
    ):
        trips.opened()
        await store.append(room.pdus)
        async with store.database.connection() as conn:
            servers = bench.size(SERVERS, 10)
            members = bench.size(MEMBERS, QUICK_MEMBERS)
            await conn.execute(SQL_FILL, room.room_id, members, servers, other)
            await conn.execute("VACUUM ANALYZE")
        before = (await store.sync(admin)).next_batch
        room.join(room.user(3, "s3.test"))
        await store.append(room.pdus)
        after = (await store.sync(admin)).next_batch
        calls = _calls(store, room.room_id, (admin, other), last.event_id, (before, after))
        found = {
            name: await _timed(call, trips, bench.size(100, 3)) for name, call in calls.items()
        }
    bench.results.update(members=members, servers=servers, calls=found)
    rows = [
        [name, one["ms"]["p50"], one["ms"]["p95"], one["statements"]] for name, one in found.items()
    ]
    show(f"A room with {members} members", ["call", "p50 ms", "p95 ms", "statements"], rows)
    bench.write()


def _calls(
    store: Store,
    room_id: RoomId,
    users: tuple[str, str],
    event_id: str,
    tokens: tuple[str, str],
) -> dict[str, Call]:
    user, other = map(UserId, users)

    async def cold() -> None:
        store.caches.members.forget(None)
        await store.member_ids(room_id)

    return {
        "member_ids": cold,
        "member_ids, same state": lambda: store.member_ids(room_id),
        "membership": lambda: store.membership(room_id, other),
        "membership, at a token": lambda: store.membership(room_id, other, at=tokens[0]),
        "joined_servers": lambda: store.joined_servers(room_id),
        "joined_servers, at an event": lambda: store.joined_servers(room_id, at_event=event_id),
        "is_resident": lambda: store.is_resident("s2.test", room_id),
        "memberships_of": lambda: store.memberships_of(user),
        "shared_rooms": lambda: store.shared_rooms(user, other),
        "users_sharing": lambda: store.users_sharing(user),
        "sharing_changes, one join": lambda: store.sharing_changes(user, *tokens),
    }


async def _timed(call: Call, trips: Trips, rounds: int) -> dict[str, Any]:
    for _ in range(3):
        await call()
    before, times = trips.count, []
    for _ in range(rounds):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return {
        "ms": percentiles(times, factor=1000),
        "statements": (trips.count - before) / rounds,
    }
