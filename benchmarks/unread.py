"""Unread counts of a user of 300 rooms: in one statement, and as a part of syncs.

A third of the rooms are read, a third have a few unread messages, a third have more than a count
can be. Every tenth room has unread replies in a thread. The messages are copies of one, inserted
into the table directly.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, LiteralString

import storage
from benchmarks.copied_events import encode_all, store_plainly
from benchmarks.harness import Bench, Trips, percentiles, show
from storage import Store
from storage.ids import EventId, UserId
from storage.testing import BuiltEvent, RoomBuilder

ROOMS: Final = 300
QUICK_ROOMS: Final = 10
SERVER: Final = "s1.test"
READ: Final = 200
"""Messages of each room that are read."""
UNREAD: Final = (0, 5, 120)
"""Unread messages of a room: a third of the rooms each."""

SQL_COPY: Final[LiteralString] = """
WITH
copied AS (
    INSERT INTO events
    SELECT made.*
    FROM events e
    CROSS JOIN generate_series($2::int, $3::int) AS n
    CROSS JOIN LATERAL jsonb_populate_record(e, jsonb_build_object(
        'event_nid', e.event_nid + 1000000000::bigint * n,
        'event_id', e.event_id || n,
        'stream_ordering', $4::bigint + n,
        'topological_ordering', e.topological_ordering + n
    )) AS made
    WHERE e.event_id = $1::text
    RETURNING room_nid, stream_ordering
)
UPDATE rooms r
SET last_stream_ordering = (SELECT max(stream_ordering) FROM copied)
FROM (SELECT DISTINCT room_nid FROM copied) AS c
WHERE r.room_nid = c.room_nid
"""

Call = Callable[[], Awaitable[Any]]


async def run(bench: Bench) -> None:
    """Measure each call in turns."""
    trips = Trips()
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER, observer=trips) as store,
    ):
        trips.opened()
        users = await _fill(store, bench.size(ROOMS, QUICK_ROOMS))
        found = {
            name: await _timed(call, trips, bench.size(200, 3))
            for name, call in (await _calls(store, users)).items()
        }
    bench.results.update(rooms=bench.size(ROOMS, QUICK_ROOMS), calls=found)
    rows = [[name, one["p50"], one["p95"], one["statements"]] for name, one in found.items()]
    show("Unread counts", ["call", "p50 ms", "p95 ms", "round trips"], rows)
    bench.write()


async def _fill(store: Store, rooms: int) -> dict[str, str]:
    """Return the users: with receipts of rooms, with receipts of threads, and without."""
    users = {name: f"@{name}:{SERVER}" for name in ("rooms", "threads", "none")}
    for number in range(rooms):
        room = RoomBuilder("11", seed=number + 1, sign=False)
        admin = room.user(1, SERVER)
        room.start(admin)
        for user in users.values():
            room.join(user)
        message = room.message(admin)
        reply = room.threaded(admin, message, "reply")
        await store.append(room.pdus)
        await _copy(store, message, reply, number)
        last = EventId(f"{message.event_id}{READ}")
        await store.receipts.set(room.room_id, "m.read", UserId(users["rooms"]), last, {})
        user, root = UserId(users["threads"]), message.event_id
        await store.receipts.set(room.room_id, "m.read", user, last, {}, thread_id="main")
        await store.receipts.set(room.room_id, "m.read", user, reply.event_id, {}, thread_id=root)
    async with store.database.connection() as conn:
        await encode_all(conn)
        await conn.execute("VACUUM ANALYZE")
    return users


async def _copy(store: Store, message: BuiltEvent, reply: BuiltEvent, number: int) -> None:
    """Insert the messages of a room, and replies in its thread."""
    base = 10_000_000 + number * 10_000
    async with store.database.connection() as conn:
        await store_plainly(conn, message.event_id, reply.event_id)
        await conn.execute(SQL_COPY, message.event_id, 1, READ, base)
        if unread := UNREAD[number % len(UNREAD)]:
            await conn.execute(SQL_COPY, message.event_id, READ + 1, READ + unread, base)
        if number % 10 == 1:
            await conn.execute(SQL_COPY, reply.event_id, 1, 5, base + 1_000)


async def _calls(store: Store, users: dict[str, str]) -> dict[str, Call]:
    user, everything = users["rooms"], ("receipts", "account_data", "to_device", "unread")
    first = await store.sync(user)

    async def initial(include: Any) -> None:
        await store.sync(user, timeline_limit=1, include=include, device_id="A")

    async def nothing_new(include: Any) -> None:
        await store.sync(user, since=first.next_batch, include=include, device_id="A")

    return {
        "receipts of rooms": lambda: store.unread(user),
        "receipts of threads": lambda: store.unread(users["threads"]),
        "no receipts": lambda: store.unread(users["none"]),
        "initial sync": lambda: initial(()),
        "initial sync with all": lambda: initial(everything),
        "nothing new": lambda: nothing_new(()),
        "nothing new, with all": lambda: nothing_new(everything),
    }


async def _timed(call: Call, trips: Trips, rounds: int) -> dict[str, float]:
    await call()
    before, times = trips.count, []
    for _ in range(rounds):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return percentiles(times, factor=1000) | {"statements": (trips.count - before) / rounds}
