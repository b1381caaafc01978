"""`verify` and `rebuild`: check or rebuild rooms in parallel, in executors.

The functions are those that process one room in one process. Large rooms are distributed by size,
so that a giant one does not delay the rest. Tasks read the ids of the others themselves. A
verifying task has one connection at a time, and reads each room in a separate snapshot. A
rebuilding task has two, and locks a room only to swap it (`storage.rebuild`). Writers
go on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any, Final, LiteralString, TypeVar

import pyarrow as pa
import uvloop
from pyspark.sql import DataFrame, SparkSession

from storage.config import Config
from storage.database.archived_bytes import MAINTENANCE_MS
from storage.database.arrow_results import arrow_snapshot
from storage.database.connection import Database
from storage.errors import ConstraintViolated, StorageCorrupt, UnknownRoom
from storage.maintenance.indexes import IndexMismatch, index_mismatches, refuse_corrupt_indexes
from storage.maintenance.local_server import local_server_name
from storage.maintenance.verify import Finding, verify_database, verify_room
from storage.maintenance.verify.graph import finding_of, hide_facts
from storage.pipeline.imports.run import LARGE_SHARE, assign_rooms
from storage.pipeline.session import Batches, executor_errors, parallelism, taken_work, task_frame
from storage.pipeline.source.filters import split
from storage.pipeline.source.rows import spark_ddl
from storage.rebuild import Rebuilder

T = TypeVar("T")

STATEMENT_TIMEOUT_MS: Final = 3_600_000
WHOLE_DATABASE: Final = ""
"""Stands for the data that all rooms share, in place of a room id."""

SQL_TOTALS: Final[LiteralString] = """
SELECT
    COALESCE((SELECT min(room_nid) FROM rooms), 0) AS first,
    COALESCE((SELECT max(room_nid) FROM rooms), -1) AS last,
    (SELECT count(*) FROM events) AS events
"""

SQL_LARGEST_ROOMS: Final[LiteralString] = """
SELECT r.room_id, found.size
FROM (
    SELECT room_nid, count(*) AS size
    FROM events
    GROUP BY room_nid
    ORDER BY size DESC, room_nid
    LIMIT $1::bigint
) AS found
JOIN rooms r USING (room_nid)
"""

SQL_SIZES_OF: Final[LiteralString] = """
SELECT r.room_id, count(*) AS size
FROM rooms r
JOIN events e USING (room_nid)
WHERE r.room_id = ANY($1::text[])
GROUP BY r.room_id
"""

SQL_ROOMS_OF_RANGE: Final[LiteralString] = """
SELECT r.room_nid, r.room_id
FROM rooms r
CROSS JOIN LATERAL (  -- by two partial indexes: any event
    (SELECT 1 FROM events WHERE room_nid = r.room_nid AND NOT outlier LIMIT 1)
    UNION ALL
    (SELECT 1 FROM events WHERE room_nid = r.room_nid AND outlier LIMIT 1)
    LIMIT 1
) AS e
WHERE r.room_nid >= $1::bigint AND r.room_nid < $2::bigint AND r.room_id <> ALL($3::text[])
ORDER BY r.room_nid
LIMIT $4::bigint
"""

LARGE_MAX: Final = 1_000
EVENTS_EACH: Final = 100_000
"""Events of a task, so that a retry repeats little."""

RANGES_EACH: Final = 4
"""Ranges of nids per task: neighbours are of one age, and of one size."""

ROOMS_MAX: Final = 100
"""Rooms whose results a task has in memory."""

FINDINGS: Final = pa.schema(
    [
        ("check", pa.string()),
        ("room_id", pa.string()),
        ("subject", pa.list_(pa.string())),
        ("found", pa.string()),
        ("expected", pa.string()),
        ("repairable", pa.bool_()),
    ]
)
REBUILT: Final = pa.schema([("room_id", pa.string()), ("error", pa.string())])

OfRooms = Callable[[Sequence[str]], Coroutine[Any, Any, pa.RecordBatch]]


def verify(
    spark: SparkSession,
    dsn: str,
    *,
    room_ids: Sequence[str] | None = None,
    server_name: str | None = None,
    tasks: int | None = None,
) -> DataFrame:
    """Return every difference between the tables and what follows from the events (`FINDINGS`).

    The table is empty if there is none. It covers these rooms, or all rooms and the data that they
    share. The driver compares the indexes with their tables at the call. Checks that would read
    through a corrupt one are skipped. At most ``tasks`` run at once, with one connection each. Each
    action on the table computes it again: `cache` it. Raise `UnknownRoom` for a room that does not
    exist, or `DatabaseError`.
    """
    mismatches = _by_driver(_mismatches(dsn))
    if mismatches:
        rows = [tuple(_row(finding_of(mismatch)).values()) for mismatch in mismatches]
        named = spark.createDataFrame(rows, spark_ddl(FINDINGS))
        return (
            named
            if hide_facts(mismatches)
            else named.unionByName(
                _verified_rooms(spark, dsn, room_ids, server_name=server_name, tasks=tasks)
            )
        )
    also = () if room_ids is not None else (WHOLE_DATABASE,)
    return _verified_rooms(spark, dsn, room_ids, server_name=server_name, tasks=tasks, also=also)


def _verified_rooms(
    spark: SparkSession,
    dsn: str,
    room_ids: Sequence[str] | None,
    *,
    server_name: str | None,
    tasks: int | None,
    also: Sequence[str] = (),
) -> DataFrame:
    of_rooms = partial(_verified_all, dsn, server_name, Config.from_env())
    return _assigned(spark, dsn, room_ids, tasks, also).each(of_rooms, FINDINGS)


@executor_errors()
def rebuild(
    spark: SparkSession,
    dsn: str,
    *,
    room_ids: Sequence[str] | None = None,
    server_name: str | None = None,
    tasks: int | None = None,
) -> dict[str, str]:
    """Rebuild everything that follows from the received bytes, room by room.

    Return the rooms where it failed, with the reason. It runs while others write and read: each
    room is swapped in one transaction, so an interrupted rebuild is simply run again. At most
    ``tasks`` run at once, with two connections each. Raise `UnknownRoom`, `DatabaseError`, or
    `StorageCorrupt` where an index is corrupt: nothing has changed then.
    """
    _by_driver(_refuse_corrupt_indexes(dsn))
    of_rooms = partial(_rebuilt_all, dsn, server_name, Config.from_env())
    failed = _assigned(spark, dsn, room_ids, tasks).each(of_rooms, REBUILT).collect()
    return {row["room_id"]: row["error"] for row in failed}


def _by_driver(work: Coroutine[Any, Any, T]) -> T:
    """Run work on the database in the driver, in another thread.

    A notebook has an event loop in this one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _mismatches(dsn: str) -> list[IndexMismatch]:
    async with _opened(dsn, Config.from_env()) as database:
        return await index_mismatches(database)


async def _refuse_corrupt_indexes(dsn: str) -> None:
    async with _opened(dsn, Config.from_env()) as database:
        await refuse_corrupt_indexes(database, "a rebuild")


@dataclass(frozen=True, slots=True)
class RoomWork:
    """A frame with the work of each task: ids of rooms, and ranges of nids of others.

    ``large`` are the rooms to leave out of the ranges.
    """

    frame: DataFrame
    dsn: str = field(repr=False)  # it may contain a password
    large: tuple[str, ...] = ()

    def each(self, of_rooms: OfRooms, schema: pa.Schema) -> DataFrame:
        """Return the rows that ``of_rooms`` returns for pages of rooms."""
        dsn, large, config = self.dsn, list(self.large), Config.from_env()

        def work(batches: Batches) -> Batches:
            items = list(taken_work(batches))
            if not items:
                return
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                for page in _pages(dsn, items, large, config):
                    yield runner.run(of_rooms(page))

        return self.frame.mapInArrow(work, spark_ddl(schema))


def _assigned(
    spark: SparkSession,
    dsn: str,
    room_ids: Sequence[str] | None,
    tasks: int | None,
    also: Sequence[str] = (),
) -> RoomWork:
    """Deal rooms out to tasks: the large ones, or the given ones, by size; others by ranges.

    The driver has the ids of at most `LARGE_MAX` rooms, unless the caller gives more.
    """
    with arrow_snapshot(dsn) as conn:
        [counts] = conn.rows(SQL_TOTALS)
        rows = (
            conn.rows(SQL_LARGEST_ROOMS, LARGE_MAX)
            if room_ids is None
            else conn.rows(SQL_SIZES_OF, list(room_ids))
        )
    sizes = {row["room_id"]: row["size"] for row in rows}
    unknown = [room_id for room_id in room_ids or () if room_id not in sizes]
    if unknown:
        raise UnknownRoom(unknown[0])
    total = counts["events"] if room_ids is None else sum(sizes.values())
    count = tasks or max(parallelism(spark), ceil(total / EVENTS_EACH))
    if room_ids is None:
        sizes = {
            room_id: size for room_id, size in sizes.items() if size > total / count / LARGE_SHARE
        }
    work: list[list[Any]] = [[] for _ in range(count)]
    for room_id, task in (dict.fromkeys(also, 0) | assign_rooms(sizes, count, total)).items():
        work[task].append(room_id)
    if room_ids is None:
        ranges = split(counts["first"], counts["last"], count * RANGES_EACH)
        for at, span in enumerate(ranges):
            work[at % count].append(span)
    return RoomWork(task_frame(spark, work), dsn, tuple(sizes))


def _pages(dsn: str, items: Iterable[Any], large: list[str], config: Config) -> Iterator[list[str]]:
    """Yield the rooms of a task, some at a time: given ones, then those of ranges."""
    room_ids = [item for item in items if isinstance(item, str)]
    for first in range(0, len(room_ids), ROOMS_MAX):
        yield room_ids[first : first + ROOMS_MAX]
    for at, end in (item for item in items if not isinstance(item, str)):
        yield from _of_range(dsn, at, end, large, config)


def _of_range(dsn: str, at: int, end: int, large: list[str], config: Config) -> Iterator[list[str]]:
    while True:
        with arrow_snapshot(dsn, config=config) as conn:
            rows = conn.rows(SQL_ROOMS_OF_RANGE, at, end, large, ROOMS_MAX)
        if rows:
            yield [row["room_id"] for row in rows]
        if len(rows) < ROOMS_MAX:
            return
        at = rows[-1]["room_nid"] + 1


async def _verified_all(
    dsn: str, server_name: str | None, config: Config, rooms: Sequence[str]
) -> pa.RecordBatch:
    async with _opened(dsn, config) as database:
        name = await local_server_name(database, server_name)
        findings = [row for room_id in rooms async for row in _verified(database, room_id, name)]
    return pa.RecordBatch.from_pylist(findings, schema=FINDINGS)


@asynccontextmanager
async def _opened(dsn: str, config: Config) -> AsyncIterator[Database]:
    config = replace(
        config,
        statement_timeout_ms=STATEMENT_TIMEOUT_MS,
        archive_timeout_ms=MAINTENANCE_MS,
        pool_size_max=2,
        instance_name="spark maintenance",
    )
    async with await Database.open(dsn, config=config) as database:
        yield database


async def _verified(
    database: Database, room_id: str, server_name: str
) -> AsyncIterator[dict[str, Any]]:
    async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
        findings = (
            verify_database(conn)
            if room_id == WHOLE_DATABASE
            else verify_room(conn, room_id, server_name=server_name)
        )
        async for finding in findings:
            yield _row(finding)


def _row(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "room_id": finding.room_id,
        "subject": list(finding.subject),
        "found": finding.found,
        "expected": finding.expected,
        "repairable": finding.repairable,
    }


async def _rebuilt_all(
    dsn: str, server_name: str | None, config: Config, rooms: Sequence[str]
) -> pa.RecordBatch:
    """Rebuild rooms; return those where it failed."""
    async with _opened(dsn, config) as database:
        name = await local_server_name(database, server_name)
    async with Rebuilder.opened(dsn, name, config) as rebuilder:
        done = [(room_id, await _error_of(rebuilder, room_id)) for room_id in rooms]
    failed = [{"room_id": room_id, "error": error} for room_id, error in done if error is not None]
    return pa.RecordBatch.from_pylist(failed, schema=REBUILT)


async def _error_of(rebuilder: Rebuilder, room_id: str) -> str | None:
    try:
        await rebuilder.rebuild(room_id)
    except (StorageCorrupt, ConstraintViolated) as error:
        return str(error)
    return None
