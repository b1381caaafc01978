"""Events in one table, in partitions by room and in partitions by arrival: slim rows, real indexes.

    python -m benchmarks partitions [--events ROWS]

Each layout gets the same rows, with the columns that the indexes of `events` need. The server's
shared buffers are a third of the index of event ids. Batches are written in random rooms, one
transaction each, flushed at commit; a checkpoint ends each round, so each round writes its pages to
the WAL once more. Reads are answered after it, by prepared statements with custom plans.
"""

import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, LiteralString, NamedTuple

import asyncpg

from benchmarks.harness import SERVER_SETTINGS, Bench, note, show
from storage.config import Config
from storage.database.embedded import EmbeddedPostgres

ROWS: Final = 50_000_000
QUICK_ROWS: Final = 50_000
ROOMS: Final = 100_000
PARTITIONS: Final = 16
STEP: Final = 1_000_000
BATCH: Final = 100
ROUNDS: Final = 5
BATCHES: Final = 100
QUESTIONS: Final = 200

SQL_TABLE: Final[LiteralString] = """
CREATE TABLE slim (
    event_nid bigint NOT NULL,
    stream_ordering bigint NOT NULL,
    topological_ordering bigint NOT NULL,
    received_ts bigint NOT NULL,
    room_nid int NOT NULL,
    event_id text COLLATE "C" NOT NULL
)
"""

# rooms of very different sizes: the largest has some thousandths of all events
SQL_ROWS: Final[LiteralString] = """
INSERT INTO slim
SELECT n, n, n, 1700000000000 + n, (power(random(), 3) * $3::int)::int,
    '$' || left(encode(sha256(int8send(n)), 'base64'), 43)
FROM generate_series($1::bigint, $2::bigint) AS n
"""

SQL_INDEXES: Final[tuple[LiteralString, ...]] = (
    "CREATE INDEX slim_event_id_idx ON slim USING hash (event_id)",
    "CREATE INDEX slim_topological_idx ON slim (room_nid, topological_ordering, stream_ordering)",
    "CREATE INDEX slim_room_stream_idx ON slim (room_nid, stream_ordering)",
    "CREATE INDEX slim_received_idx ON slim USING brin (received_ts) WITH (pages_per_range = 8)",
    "CREATE UNIQUE INDEX slim_event_nid_key ON slim ({nid})",
    "CREATE UNIQUE INDEX slim_stream_ordering_key ON slim ({stream})",
)

SQL_WRITE: Final[LiteralString] = """
WITH given AS (
    SELECT n, '$' || left(encode(sha256(int8send(n)), 'base64'), 43) AS event_id
    FROM generate_series($1::bigint, $2::bigint) AS n
), stored AS (
    SELECT count(*) AS duplicates
    FROM given g
    CROSS JOIN LATERAL (SELECT 1 FROM slim s WHERE s.event_id = g.event_id OFFSET 0) AS s
)
INSERT INTO slim
SELECT n, n, n, 1700000000000 + n, (power(random(), 3) * $3::int)::int, event_id
FROM given, stored WHERE duplicates = 0
"""

SQL_BY_ID: Final[LiteralString] = """
SELECT s.event_nid
FROM unnest($1::text[]) AS g(event_id)
CROSS JOIN LATERAL (SELECT event_nid FROM slim s WHERE s.event_id = g.event_id OFFSET 0) AS s
"""
SQL_BY_ID_IN_ROOM: Final[LiteralString] = """
SELECT s.event_nid
FROM unnest($1::text[], $2::int[]) AS g(event_id, room_nid)
CROSS JOIN LATERAL (
    SELECT event_nid FROM slim s WHERE s.event_id = g.event_id AND s.room_nid = g.room_nid OFFSET 0
) AS s
"""
SQL_PAGE: Final[LiteralString] = """
SELECT event_id FROM slim WHERE room_nid = $1::int
ORDER BY topological_ordering DESC, stream_ordering DESC LIMIT 100
"""
SQL_TIMELINE: Final[LiteralString] = """
SELECT event_id FROM slim WHERE room_nid = $1::int ORDER BY stream_ordering DESC LIMIT 20
"""
SQL_STREAM: Final[LiteralString] = """
SELECT event_id FROM slim WHERE stream_ordering > $1::bigint ORDER BY stream_ordering LIMIT 1000
"""
SQL_SOME: Final[LiteralString] = (
    "SELECT event_id, room_nid FROM slim WHERE event_nid = ANY($1::bigint[])"
)
SQL_SIZES: Final[LiteralString] = """
SELECT CASE WHEN relkind = 'r' THEN 'rows' WHEN am.amname = 'hash' THEN 'hash'
        ELSE 'other indexes' END,
    sum(pg_relation_size(c.oid))::float8
FROM pg_class c JOIN pg_am am ON am.oid = c.relam
WHERE c.relname LIKE 'slim%' AND c.relkind IN ('r', 'i') GROUP BY 1
"""


class Layout(NamedTuple):
    """How the table is divided, and what its unique indexes have to contain besides."""

    clause: str
    children: Callable[[int], list[str]]
    nid: str
    stream: str


LAYOUTS: Final = {
    "one table": Layout("", lambda _: [], "event_nid", "stream_ordering"),
    "by room": Layout(
        " PARTITION BY HASH (room_nid)",
        lambda _: [
            f"CREATE TABLE slim_{n} PARTITION OF slim"
            f" FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER {n})"
            for n in range(PARTITIONS)
        ],
        "event_nid, room_nid",
        "stream_ordering, room_nid",
    ),
    "by arrival": Layout(
        " PARTITION BY RANGE (event_nid)",
        lambda rows: [
            f"CREATE TABLE slim_{n} PARTITION OF slim FOR VALUES FROM ({_at(rows, n)})"
            f" TO ({_at(rows, n + 1) if n < PARTITIONS - 1 else 'MAXVALUE'})"
            for n in range(PARTITIONS)
        ],
        "event_nid",
        "stream_ordering, event_nid",
    ),
}


def _at(rows: int, partition: int) -> int:
    return rows * partition // PARTITIONS


async def run(bench: Bench) -> None:
    """Fill each layout, measure it, and drop it before the next."""
    rows = bench.events or bench.size(ROWS, QUICK_ROWS)
    buffers = max(16, rows // 100_000)  # MB: a third of the index of event ids
    bench.results |= {"rows": rows, "shared_buffers_mb": buffers, "partitions": PARTITIONS}
    with tempfile.TemporaryDirectory(prefix="room-storage-bench-") as folder:
        server = EmbeddedPostgres(
            Path(folder) / "server", config=Config(embedded_shared_buffers_mb=buffers)
        )
        server.start()
        try:
            for name, layout in LAYOUTS.items():
                async with _filled(server.dsn, layout, rows) as conn:
                    bench.results[name] = await _measured(conn, rows)
                    note(f"{name}: {bench.results[name]}")
        finally:
            server.stop()
    bench.write()
    measures = list(bench.results["one table"])
    show(
        f"{rows:,} slim rows",
        ["measure", *LAYOUTS],
        [[what, *(bench.results[name][what] for name in LAYOUTS)] for what in measures],
    )


@asynccontextmanager
async def _filled(dsn: str, layout: Layout, rows: int) -> "AsyncIterator[asyncpg.Connection[Any]]":
    conn = await asyncpg.connect(dsn)
    try:
        for setting, value in SERVER_SETTINGS.items():
            await conn.execute(f"ALTER SYSTEM SET {setting} = '{value}'")
        await conn.execute("SELECT pg_reload_conf()")
        await conn.execute("SET maintenance_work_mem = '512MB'")
        await conn.execute(SQL_TABLE + layout.clause)
        for statement in layout.children(rows):
            await conn.execute(statement)
        for first in range(1, rows + 1, STEP):
            await conn.execute(SQL_ROWS, first, min(first + STEP - 1, rows), ROOMS)
        for statement in SQL_INDEXES:
            await conn.execute(statement.format(nid=layout.nid, stream=layout.stream))
        await conn.execute("VACUUM ANALYZE slim")
        await conn.execute("CHECKPOINT")
        yield conn
        await conn.execute("DROP TABLE slim")
    finally:
        await conn.close()


async def _measured(conn: "asyncpg.Connection[Any]", rows: int) -> dict[str, float]:
    sizes = {f"{part} B": round(size / rows, 1) for part, size in await conn.fetch(SQL_SIZES)}
    times, logs = [], []
    at = rows
    for _ in range(ROUNDS):
        await conn.execute("CHECKPOINT")
        before = await _log_position(conn)
        for _ in range(BATCHES):
            start = time.perf_counter()
            await conn.execute(SQL_WRITE, at + 1, at + BATCH, ROOMS)
            times.append(time.perf_counter() - start)
            at += BATCH
        logs.append((await _log_position(conn) - before) / BATCHES / BATCH)
    places = await _places(conn, rows)
    return {
        "batch of 100 ms": round(statistics.median(times) * 1e3, 2),
        "log B a row": round(statistics.median(logs)),
        "100 ids ms": await _asked(conn, SQL_BY_ID, [(ids,) for ids, _ in places]),
        "100 ids of known rooms ms": await _asked(conn, SQL_BY_ID_IN_ROOM, places),
        "page ms": await _asked(conn, SQL_PAGE, _some(ROOMS)),
        "timeline ms": await _asked(conn, SQL_TIMELINE, _some(ROOMS)),
        "1,000 of the stream ms": await _asked(conn, SQL_STREAM, _some(rows - 1_000)),
    } | sizes


async def _log_position(conn: "asyncpg.Connection[Any]") -> int:
    return int(await conn.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))


def _some(upto: int) -> list[tuple[int]]:
    """Return numbers that are spread evenly, the same in each run."""
    return [(1 + number * 7_919 * 104_729 % upto,) for number in range(QUESTIONS)]


async def _places(conn: "asyncpg.Connection[Any]", rows: int) -> list[tuple[list[str], list[int]]]:
    """Return a hundred ids with their rooms for each question."""
    every = [1 + number * 7_919 * 104_729 % rows for number in range(QUESTIONS * BATCH)]
    found = [
        await conn.fetch(SQL_SOME, every[at : at + BATCH]) for at in range(0, len(every), BATCH)
    ]
    return [([row[0] for row in some], [row[1] for row in some]) for some in found]


async def _asked(
    conn: "asyncpg.Connection[Any]", sql: str, given: Sequence[Sequence[Any]]
) -> float:
    prepared = await conn.prepare(sql)
    times = []
    for arguments in given:
        start = time.perf_counter()
        await prepared.fetch(*arguments)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 3)
