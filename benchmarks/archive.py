"""The archive of old event bytes: the table `events` with nine tenths archived, and pages of it.

    python -m benchmarks archive

Two rooms of signed messages, alike. Nine tenths of the first are archived in a local folder; pages
of 100 of both are read in turns, all old, each page once per round and warm. Then the second is
archived, too, and the table is measured: heap and large values, always after VACUUM FULL. It is
compared with the table of encoded events, and with that of events as they were received.
"""

import statistics
import tempfile
import time
from typing import Any, Final

import asyncpg

import storage
from benchmarks.harness import Bench, note, show, spent
from storage.maintenance.cold_archive import archive_events, return_events
from storage.testing import RoomBuilder
from tests.stored_bytes import decode_all

BATCH: Final = 100
PAGE: Final = 100
ROUNDS: Final = 15
PAGES: Final = 12
SHARE: Final = 0.9
MEMBERS: Final = 50
TARGETS: Final = {"page": 5.0, "shrinks by": 0.6}

TABLE: Final = "SELECT pg_table_size('events')"


async def run(bench: Bench) -> None:
    """Measure pages, then sizes."""
    messages = bench.size(12_000, 2_000)
    async with bench.database() as dsn:
        config = storage.Config(cache_reads=False)
        async with storage.open(dsn, server_name="s1.test", config=config) as store:
            rooms = [_room(messages, seed) for seed in (1, 2)]
            for room in rooms:
                for start in range(0, len(room.pdus), BATCH):
                    await store.append(room.pdus[start : start + BATCH])
            connection = await asyncpg.connect(dsn)
            with tempfile.TemporaryDirectory() as folder:
                bench.results["archiving"] = await _archived(bench, store, rooms[0], folder)
                await connection.execute("VACUUM ANALYZE events")
                bench.results["page"] = await _pages(bench, store, rooms)
                bench.results["table"] = await _sizes(store, connection, rooms[1], folder)
            await connection.close()
    bench.write()
    page, table = bench.results["page"], bench.results["table"]
    show(
        f"Pages of {PAGE} old events, ms (targets: {TARGETS})",
        ["in the table", "in the archive", "ratio"],
        [[page["table"], page["archive"], page["ratio"]]],
    )
    show(
        f"The table `events`, bytes an event, {SHARE:.0%} of events archived",
        ["as received", "encoded", "archived", "less than received", "less than encoded"],
        [list(table.values())],
    )


def _room(messages: int, seed: int) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed)
    room.start("@user0:s1.test")
    users = [f"@user{number}:s1.test" for number in range(1, MEMBERS)]
    for user in users:
        room.join(user)
    for number in range(messages):
        text = f"what is said is as long as what people say, here for the {number}th time"
        room.message(users[number * 7919 % len(users)], text)
    return room


async def _archived(bench: Bench, store: Any, room: RoomBuilder, folder: str) -> dict[str, Any]:
    with spent(bench.server) as cost:
        done = await archive_events(
            store.database,
            older_than_ms=-1,
            url=folder,
            room_ids=[room.room_id],
            limit=round(SHARE * len(room.events)),
        )
    note(f"archived {done.events} events in {cost.clock:.1f} s")
    return {
        "events": done.events,
        "us of processor time an event": round(
            (cost.python + cost.backends) / max(done.events, 1) * 1e6, 1
        ),
    }


async def _pages(bench: Bench, store: Any, rooms: list[RoomBuilder]) -> dict[str, Any]:
    """Read the first tenths of both rooms, forwards, in turns."""
    starts = [await _tokens(store, room) for room in rooms]
    times: list[list[float]] = [[], []]
    for number in range(bench.size(ROUNDS, 4) * PAGES):
        for side in (0, 1) if number % 2 else (1, 0):
            token = starts[side][number % len(starts[side])]
            begun = time.perf_counter()
            page = await store.messages(
                rooms[side].room_id, "@user1:s1.test", from_=token, direction="f", limit=PAGE
            )
            _ = [event.content for event in page.chunk]
            if number >= PAGES:
                times[side].append((time.perf_counter() - begun) * 1e3)
    archive, table = (statistics.median(one) for one in times)
    return {
        "table": round(table, 3),
        "archive": round(archive, 3),
        "ratio": round(archive / table + 0.005, 2),
        "pages": len(times[0]),
    }


async def _tokens(store: Any, room: RoomBuilder) -> list[str]:
    tokens, token = list[str](), None
    for _ in range(PAGES + 1):
        page = await store.messages(
            room.room_id, "@user1:s1.test", from_=token, direction="f", limit=PAGE
        )
        token = page.end
        tokens.append(token)
    return tokens[:-1]


async def _sizes(store: Any, connection: Any, other: RoomBuilder, folder: str) -> dict[str, float]:
    count = await connection.fetchval("SELECT count(*) FROM events")
    await archive_events(
        store.database,
        older_than_ms=-1,
        url=folder,
        room_ids=[other.room_id],
        limit=round(SHARE * len(other.events)),
    )
    archived = await _table(connection)
    await return_events(store.database, grace_s=0.1)
    encoded = await _table(connection)
    async with store.database.transaction() as conn:
        await decode_all(conn)
    received = await _table(connection)
    return {
        "received": round(received / count, 1),
        "encoded": round(encoded / count, 1),
        "archived": round(archived / count, 1),
        "less than received": int((1 - archived / received) * 1000) / 1000,
        "less than encoded": int((1 - archived / encoded) * 1000) / 1000,
    }


async def _table(connection: Any) -> int:
    await connection.execute("VACUUM FULL events")
    return int(await connection.fetchval(TABLE))
