"""The limits of this Postgres: the same rows by bare statements, without an engine."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

RAW_TABLE: Final = (
    """CREATE TABLE raw (event_id text COLLATE "C" PRIMARY KEY, json bytea NOT NULL)"""
)
RAW_ONE: Final = "INSERT INTO raw (event_id, json) VALUES ($1::text, $2::bytea)"
RAW_MANY: Final = "INSERT INTO raw SELECT * FROM unnest($1::text[], $2::bytea[])"
BARE_COMMIT: Final = "SELECT pg_logical_emit_message(true, 'bench', 'x')"
POINT: Final = "SELECT json FROM raw WHERE event_id = $1::text"
RANGE: Final = "SELECT json FROM raw WHERE event_id >= $1::text ORDER BY event_id LIMIT $2::bigint"
RANGE_OF_IDS: Final = (
    "SELECT event_id FROM raw WHERE event_id >= $1::text ORDER BY event_id LIMIT $2::bigint"
)


class Ids:
    """Ids as long as those of events, never repeated."""

    last = 0

    @classmethod
    def take(cls, count: int) -> list[str]:
        """Return the next ones."""
        cls.last += count
        return [f"${number:043d}" for number in range(cls.last - count, cls.last)]


async def bare_inserts(pool: Any, clients: list[list[list[bytes]]]) -> float:
    """Return events per second of the durable insert of the same batches, by as many clients."""
    rows = [[(Ids.take(len(batch)), batch) for batch in batches] for batches in clients]
    start = time.perf_counter()
    await asyncio.gather(*(_insert_all(pool, own) for own in rows))
    return sum(len(ids) for own in rows for ids, _ in own) / (time.perf_counter() - start)


async def _insert_all(pool: Any, batches: Sequence[tuple[list[str], list[bytes]]]) -> None:
    async with pool.acquire() as connection:
        one, many = await connection.prepare(RAW_ONE), await connection.prepare(RAW_MANY)
        for ids, pdus in batches:
            await (one.fetch(ids[0], pdus[0]) if len(ids) == 1 else many.fetch(ids, pdus))


async def measured(pool: Any, pdus: Sequence[bytes], times: int) -> dict[str, float]:
    """Return COPY rows per second, and median milliseconds of a commit, a point and a range select.

    The range has 100 rows by index.
    """
    ids = Ids.take(len(pdus))
    async with pool.acquire() as connection:
        start = time.perf_counter()
        await connection.copy_records_to_table(
            "raw", records=zip(ids, pdus, strict=True), columns=("event_id", "json")
        )
        copied = len(pdus) / (time.perf_counter() - start)
        await connection.execute("VACUUM ANALYZE raw")
        commit, point, span = [await connection.prepare(sql) for sql in (BARE_COMMIT, POINT, RANGE)]
        return {
            "copy_rows_per_second": round(copied),
            "commit_ms": await _median(commit.fetch, [()] * times),
            "point_select_ms": await _median(
                point.fetch, [(ids[number % len(ids)],) for number in range(times)]
            ),
            "index_range_100_ms": await _median(
                span.fetch, [(ids[number % max(len(ids) - 100, 1)], 100) for number in range(times)]
            ),
        }


async def index_range(pool: Any, rows: int, *, bodies: bool) -> float:
    """Return seconds for a number of rows of `raw` by index, whole, or only their ids."""
    async with pool.acquire() as connection:
        statement = await connection.prepare(RANGE if bodies else RANGE_OF_IDS)
        start = time.perf_counter()
        found = await statement.fetch("", rows)
        taken = time.perf_counter() - start
    if len(found) != rows:
        raise RuntimeError(f"{len(found)} rows for a range of {rows}")
    return taken


async def _median(
    ask: Callable[..., Awaitable[object]], arguments: Sequence[Sequence[object]]
) -> float:
    taken = []
    for given in arguments:
        start = time.perf_counter()
        await ask(*given)
        taken.append(time.perf_counter() - start)
    return round(statistics.median(taken) * 1_000, 4)
