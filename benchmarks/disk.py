"""The disk usage of an event: by table and index, per event and per state change, and in the log.

Many rooms of 500 events, and few, because an almost empty database has pages that it needs anyway;
rooms of 100; a large room with mostly messages; a series of joins and leaves, in which every event
is a state change. Events are signed, and appended in batches of 100. Sizes are those of the files,
less those of an empty database. Nothing is vacuumed: the only dead rows are old versions that
appends rewrite. The write-ahead log is counted from a checkpoint on, so it includes the page images
that follow one.
"""

from collections.abc import Iterator
from typing import Any, Final

import asyncpg

import storage
from benchmarks.harness import ACCEPTED, Bench, stored
from storage.testing import SHAPES, RoomBuilder, generate_room

BATCH: Final = 100
WRITTEN: Final = ACCEPTED | {"redacted", "rejected"}
RELATIONS: Final = """
SELECT c.relname, COALESCE(t.relname, c.relname) AS of_table, c.relkind = 'i' AS is_index,
    CASE c.relkind WHEN 'i' THEN pg_relation_size(c.oid) ELSE pg_table_size(c.oid) END AS bytes
FROM pg_class c
LEFT JOIN pg_index i ON i.indexrelid = c.oid
LEFT JOIN pg_class t ON t.oid = i.indrelid
WHERE c.relkind IN ('r', 'i') AND c.relnamespace = current_schema()::regnamespace
"""
COUNTS: Final = """
SELECT count(*) AS events, count(*) FILTER (WHERE state_key_nid IS NOT NULL) AS state_events,
    sum(octet_length(json)) AS json_bytes FROM events
"""
STATE_TABLES: Final = frozenset(
    [
        "state_groups",
        "current_state",
        "state_deltas",
        "memberships",
        "auth_chains",
        "auth_chain_links",
        "visibility",
        "audiences",
        "state_keys",
        "principals",
    ]
)


async def run(bench: Bench) -> None:
    """Measure each kind of rooms."""
    bench.results["small rooms"] = await _measure(
        bench, _small(bench.size(100, 2), bench.size(500, 100))
    )
    bench.results["few rooms"] = await _measure(
        bench, _small(bench.size(20, 2), bench.size(500, 100))
    )
    bench.results["rooms of 100"] = await _measure(
        bench, _small(bench.size(500, 2), bench.size(100, 50))
    )
    bench.results["5,000 members"] = await _measure(
        bench, _large(bench.size(5_000, 200), bench.size(10_000, 400))
    )
    bench.results["join-leave storm"] = await _measure(bench, _storm(bench.size(5_000, 200)))


def _small(rooms: int, events: int) -> Iterator[list[bytes]]:
    for number in range(rooms):
        yield from _batches(
            [event.pdu for event in generate_room(SHAPES["small_chat"], events, seed=number)]
        )


def _large(members: int, messages: int) -> Iterator[list[bytes]]:
    room = RoomBuilder("11", seed=1)
    room.start("@admin:s1.test")
    users = [f"@user{number}:s{number % 20}.test" for number in range(members)]
    for user in users:
        room.join(user)
    for number in range(messages):
        room.message(
            users[number * 7919 % members],
            f"what is said is as long as what people say, here for the {number}th time",
        )
    yield from _batches(room.pdus)


def _storm(users: int) -> Iterator[list[bytes]]:
    room = RoomBuilder("11", seed=2)
    room.start("@admin:s1.test")
    for number in range(users):
        user = f"@spam{number}:s{number % 20}.test"
        room.join(user)
        room.leave(user)
    yield from _batches(room.pdus)


def _batches(pdus: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(pdus), BATCH):
        yield pdus[start : start + BATCH]


async def _measure(bench: Bench, batches: Iterator[list[bytes]]) -> dict[str, Any]:
    async with bench.database() as dsn:
        connection = await asyncpg.connect(dsn)
        try:
            async with storage.open(dsn, server_name="s1.test") as store:
                empty = await _sizes(connection)
                await connection.execute("CHECKPOINT")
                before = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
                received = 0
                for batch in batches:
                    received += sum(map(len, batch))
                    await stored(store, batch, outcomes=WRITTEN)
            log = await connection.fetchval(
                "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1)::bigint", before
            )
            counts = dict(await connection.fetchrow(COUNTS) or {})
            sizes = await _sizes(connection)
        finally:
            await connection.close()
    grown = {
        name: (table, is_index, size - empty[name][2])
        for name, (table, is_index, size) in sizes.items()
    }
    return _per_event(
        counts, {name: one for name, one in grown.items() if one[2] > 0}, int(log or 0), received
    )


async def _sizes(connection: Any) -> dict[str, tuple[str, bool, int]]:
    return {
        name: (table, is_index, size)
        for name, table, is_index, size in await connection.fetch(RELATIONS)
    }


def _per_event(
    counts: dict[str, Any], grown: dict[str, tuple[str, bool, int]], log: int, received: int
) -> dict[str, Any]:
    events, changes = counts["events"], counts["state_events"]
    tables: dict[str, dict[str, float]] = {}
    for name, (table, is_index, size) in grown.items():
        tables.setdefault(table, {})[name if is_index else "rows"] = round(size / events, 1)
    of_state = sum(size for table, _, size in grown.values() if table in STATE_TABLES)
    return {
        "events": events,
        "state events": changes,
        "json as received, bytes an event": round(received / events, 1),
        "json as stored, bytes an event": round(int(counts["json_bytes"]) / events, 1),
        "all, bytes an event": round(sum(size for *_, size in grown.values()) / events, 1),
        "events with their indexes, bytes an event": round(
            sum(size for table, _, size in grown.values() if table == "events") / events, 1
        ),
        "state, bytes a state change": round(of_state / changes, 1),
        "log, bytes an event": round(log / events, 1),
        "tables, bytes an event": dict(
            sorted(tables.items(), key=lambda one: -sum(one[1].values()))
        ),
    }
