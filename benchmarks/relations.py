"""Relations of an event, by their number: pages of them, recursive pages, and aggregations.

Half of the relations are replies in the event's thread, half are reactions. They are copies of one
of each, inserted into the table directly.

Stored bytes belong to the id of their event. So events are stored as the bytes themselves before
they are copied by SQL, and all are encoded after it (`store_plainly`, `encode_all`).
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final, LiteralString, NamedTuple

import storage
from benchmarks.harness import Bench, Trips, timed
from storage import Store
from storage.codec import decode
from storage.database.connection import Connection
from storage.ids import EventId
from storage.maintenance.reencode import encode_batch
from storage.queries.events import SQL_EVENTS, EventWithVerdictRow
from storage.testing import BuiltEvent, RoomBuilder

BATCH: Final = 5_000

SQL_SET: Final[LiteralString] = "UPDATE events SET json = $2::bytea WHERE event_id = $1::text"


async def store_plainly(conn: Connection, *event_ids: EventId) -> None:
    """Store these events as the bytes themselves."""
    for row in await conn.fetch(SQL_EVENTS, list(event_ids), row=EventWithVerdictRow):
        event = row.event
        raw: Any = decode(event.json, event.event_id, event.room_id)
        await conn.execute(SQL_SET, event.event_id, raw)


async def encode_all(conn: Connection) -> None:
    """Encode all events that are not."""
    place: int | None = 0
    while place is not None:
        place = (await encode_batch(conn, place, BATCH)).place


SIZES: Final = (100, 1_000, 10_000, 100_000)
QUICK_SIZES: Final = (100, 1_000)
MESSAGES: Final = 200

SQL_COPY: Final[LiteralString] = """
INSERT INTO events
SELECT made.*
FROM events e
CROSS JOIN generate_series(1, $2::int) AS n
CROSS JOIN LATERAL jsonb_populate_record(e, jsonb_build_object(
    'event_nid', e.event_nid + 1000000000::bigint * n,
    'event_id', e.event_id || n,
    'stream_ordering', e.stream_ordering + 1000000 + 2 * n,
    'topological_ordering', e.topological_ordering + n
)) AS made
WHERE e.event_id = $1::text
"""

SQL_COST: Final[LiteralString] = """
SELECT pg_relation_size('events_relation_idx')::float8 / count(*) AS index_bytes, avg(
        pg_column_size(e.*) - pg_column_size(jsonb_populate_record(e,
            '{"relates_to": null, "rel_type_nid": null, "replaces": null}'))
    )::float8 AS row_bytes
FROM events e
WHERE relates_to IS NOT NULL
"""

Question = Callable[[], Awaitable[Any]]


class RelationCostRow(NamedTuple):
    """Bytes for each relation."""

    index_bytes: float
    row_bytes: float


async def run(bench: Bench) -> None:
    """Measure each size, and show the growth."""
    for related in QUICK_SIZES if bench.quick else SIZES:
        bench.results[str(related)] = await _measure(bench, related, rounds=bench.size(200, 5))


async def _measure(bench: Bench, related: int, rounds: int) -> dict[str, Any]:
    room = RoomBuilder("11", seed=1, sign=False)
    user = room.user(1, "s1.test")
    room.start(user)
    root = room.message(user)
    reply, reaction = room.threaded(user, root, "reply"), room.react(user, root)
    for _ in range(MESSAGES):
        room.message(user)
    trips = Trips()
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name="s1.test", observer=trips) as store,
    ):
        trips.opened()
        await store.append(room.pdus)
        await _fill(store, (reply, reaction), related)
        results: dict[str, Any] = {
            name: await timed(question, trips, rounds)
            for name, question in _questions(store, room, root, user).items()
        }
        async with store.database.connection() as conn:
            [row] = await conn.fetch(SQL_COST, row=RelationCostRow)
        return results | {"bytes": row}


async def _fill(store: Store, copied: tuple[BuiltEvent, ...], related: int) -> None:
    """Insert the relations, and analyse the table for the planner."""
    async with store.database.connection() as conn:
        await store_plainly(conn, *(event.event_id for event in copied))
        for event in copied:
            await conn.execute(SQL_COPY, event.event_id, related // 2)
        await encode_all(conn)
        await conn.execute("REINDEX INDEX events_relation_idx")
        await conn.execute("VACUUM ANALYZE events")


def _questions(store: Store, room: RoomBuilder, root: BuiltEvent, user: str) -> dict[str, Question]:
    plain = [event.event_id for event in room.events[-100:]]
    return {
        "a page of 20": lambda: store.relations(root.event_id, user, limit=20),
        "20 of the thread": lambda: store.relations(
            root.event_id, user, rel_type="m.thread", limit=20
        ),
        "20, indirect too": lambda: store.relations(root.event_id, user, limit=20, recurse=True),
        "told with the event": lambda: store.aggregations(user, [root.event_id]),
        "told with 100 others": lambda: store.aggregations(user, plain),
        "100 messages": lambda: store.messages(room.room_id, user, limit=100),
        "100 messages, aggregated": lambda: store.messages(
            room.room_id, user, limit=100, aggregations=True
        ),
    }
