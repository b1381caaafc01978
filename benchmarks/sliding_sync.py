"""Sliding sync of a user in 10,000 rooms, and of one in 1,000: a window of the latest 20 rooms.

The request is like that of a client that shows a list of rooms: 20 events of each, and the state
that the list needs. Before each request ten of the rooms get a message: ten that the client has, or
ten that it was not sent. The filter leaves out spaces and direct chats. Then a room with 50,000
members gets messages while members of it sync. What this writes for sliding sync is counted.
"""

import random
from collections.abc import Sequence
from typing import Any, Final, LiteralString, NamedTuple

import storage
from benchmarks.asking import AskedEngine, Prepare, Question, ask_all, sides_of
from benchmarks.crowd import EVERYWHERE, SERVER, Crowd, room_id
from benchmarks.harness import Bench
from storage import SlidingFilter, SlidingList, SlidingSync, SlidingSyncRequest, Store
from storage.testing import RoomBuilder

CROWDS: Final = (Crowd(10_000, 250_000, 500), Crowd(1_000, 25_000, 500))
QUICK_CROWDS: Final = (Crowd(80, 4_000, 100), Crowd(40, 2_000, 100))
CHANGED: Final = 10
WINDOW: Final = 20
READERS: Final = 20
DEVICE: Final = "PHONE"
STATE: Final = (
    ("m.room.create", ""),
    ("m.room.name", ""),
    ("m.room.avatar", ""),
    ("m.room.topic", ""),
    ("m.room.encryption", ""),
    ("m.room.join_rules", ""),
    ("m.room.power_levels", ""),
    ("m.room.member", "$ME"),
    ("m.room.member", "$LAZY"),
)
ROOMS: Final = SlidingFilter(is_dm=False, not_room_types=["m.space"])
MEMBERS: Final = 50_000
QUICK_MEMBERS: Final = 500
SERVERS: Final = 1_000
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
SQL_WRITTEN: Final[LiteralString] = """
SELECT relname::text AS name, n_tup_ins + n_tup_upd + n_tup_del AS rows
FROM pg_stat_user_tables
WHERE relname LIKE 'sliding%'
ORDER BY 1
"""
SQL_FLUSH: Final[LiteralString] = "SELECT pg_stat_force_next_flush()"


class WrittenRow(NamedTuple):
    """The rows that were ever inserted, updated and deleted in a table."""

    name: str
    rows: int


def request(conn_id: str = "", **more: Any) -> SlidingSyncRequest:
    given: dict[str, Any] = {"timeline_limit": 20, "required_state": STATE} | more
    return SlidingSyncRequest(conn_id, {"all": SlidingList([(0, WINDOW - 1)], **given)})


async def run(bench: Bench) -> None:
    """Measure all requests, and count what a large room writes."""
    async with sides_of(bench, QUICK_CROWDS if bench.quick else CROWDS) as both:
        rounds = bench.size(200, 10)
        filtered = request("filtered", filters=ROOMS)
        asked: dict[str, tuple[Prepare, int]] = {
            "10 changed": (_changed(request("live"), sent=True), rounds),
            "10 changed, not sent before": (_changed(request("new"), sent=False), rounds),
            "10 changed, with a filter": (_changed(filtered, sent=True), rounds),
            "nothing new": (_nothing(request("quiet")), rounds),
            "first request": (_first(request("first"), cold=False), rounds // 4),
            "first request, nothing cached": (_first(request("cold"), cold=True), rounds // 8),
            "first request, with a filter": (
                _first(request("first", filters=ROOMS), cold=False),
                rounds // 4,
            ),
        }
        await ask_all(bench, both, asked)
    bench.results["large room"] = await _large_room(bench)


async def _look(side: AskedEngine, wanted: SlidingSyncRequest, pos: str | None) -> SlidingSync:
    return await side.store.sliding_sync(EVERYWHERE, wanted, device_id=DEVICE, pos=pos)


def _changed(wanted: SlidingSyncRequest, *, sent: bool) -> Prepare:
    """Return the preparation of requests after messages in ten rooms.

    ``sent``: the client was sent these rooms; otherwise they come into the window.
    """
    positions: dict[str, str] = {}
    shown: dict[str, list[str]] = {}

    async def prepare(side: AskedEngine, number: int) -> Question:
        answer = await _look(side, wanted, positions.get(side.name))
        shown[side.name] = _latest(shown.get(side.name, []), answer)
        numbers = [int(one.partition(":")[0][len("!crowd") :]) for one in shown[side.name]]
        choice = random.Random(number)
        if not sent:
            numbers = [one for one in range(side.crowd.rooms) if one not in set(numbers)]
        chosen = choice.sample(numbers, min(CHANGED, len(numbers)))
        await side.say(chosen)
        due = {room_id(one) for one in chosen}

        async def question() -> None:
            found = await _look(side, wanted, answer.pos)
            if set(found.rooms) != due:
                raise AssertionError(f"{len(found.rooms)} rooms, not {len(due)}")

        positions[side.name] = answer.pos
        return question

    return prepare


def _latest(before: Sequence[str], answer: SlidingSync) -> list[str]:
    """Return the rooms that the client shows: those of the response, and older ones."""
    return [*answer.rooms, *(one for one in before if one not in answer.rooms)][:WINDOW]


def _nothing(wanted: SlidingSyncRequest) -> Prepare:
    positions: dict[str, str] = {}

    async def prepare(side: AskedEngine, _number: int) -> Question:
        if side.name not in positions:
            positions[side.name] = (await _look(side, wanted, None)).pos
        return lambda: _look(side, wanted, positions[side.name])

    return prepare


def _first(wanted: SlidingSyncRequest, *, cold: bool) -> Prepare:
    """Return the preparation of first requests; ``cold``: of a process that has cached nothing."""

    async def prepare(side: AskedEngine, _number: int) -> Question:
        if cold:
            side.store.caches.restart(0)
        return lambda: _look(side, wanted, None)

    return prepare


async def _large_room(bench: Bench) -> dict[str, Any]:
    """Return the rows that messages to a room of 50,000 members write for sliding sync."""
    room = RoomBuilder("11", seed=1, sign=False)
    admin, other = room.user(1, SERVER), room.user(2, "s2.test")
    readers = [f"@reader{number}:{SERVER}" for number in range(READERS)]
    room.start(admin)
    for user in (other, *readers):
        room.join(user)
    members = bench.size(MEMBERS, QUICK_MEMBERS)
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
        async with store.database.connection() as conn:
            await conn.execute(SQL_FILL, room.room_id, members, bench.size(SERVERS, 10), other)
            await conn.execute("VACUUM ANALYZE")
        tokens = {user: await _read(store, user, None) for user in readers}
        before = await _written(store)
        messages = 10
        for _ in range(messages):
            room.message(admin)
            await store.append(room.pdus[-1:])
            tokens = {user: await _read(store, user, pos) for user, pos in tokens.items()}
        after = await _written(store)
    rows = {name: after[name] - before[name] for name in after}
    return {"members": members, "readers": READERS, "messages": messages, "rows": rows}


async def _read(store: Store, user: str, pos: str | None) -> str:
    return (await store.sliding_sync(user, request(), device_id=DEVICE, pos=pos)).pos


async def _written(store: Store) -> dict[str, int]:
    async with store.database.connection() as conn:
        await conn.fetchval(SQL_FLUSH)
        return {row.name: row.rows for row in await conn.fetch(SQL_WRITTEN, row=WrittenRow)}
