"""`verify` and `rebuild`: check or rebuild rooms in parallel, in executors.

The functions are those that process one room in one process. Rooms are distributed by size, so that
a giant one does not delay the rest. A verifying task has one connection at a time, and reads each
room in a separate snapshot. A rebuilding task has two, and locks a room only to swap it
(`storage.pipeline.rebuilding`). Writers go on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, LiteralString, TypeVar

import pyarrow as pa
import uvloop
from pyspark.sql import DataFrame, SparkSession

from storage.config import Config
from storage.database.arrow_results import arrow_snapshot
from storage.database.connection import Database
from storage.errors import PartialState, StorageCorrupt, UnknownRoom
from storage.maintenance.indexes import Lie, lies, prove_indexes
from storage.maintenance.local_server import local_server_name
from storage.maintenance.verify import Finding, verify_database, verify_room
from storage.maintenance.verify.indexes import finding_of, hide_facts
from storage.pipeline.failures import executor_errors
from storage.pipeline.imports.run import deal
from storage.pipeline.rebuilding import Rebuilder
from storage.pipeline.source.rows import spark_ddl

T = TypeVar("T")

STATEMENT_TIMEOUT_MS: Final = 3_600_000
WHOLE_DATABASE: Final = ""
"""Stands for the data that all rooms share, in place of a room id."""

SQL_ROOM_SIZES: Final[LiteralString] = """
SELECT r.room_id, count(*) AS size
FROM rooms r
JOIN events e USING (room_nid)
GROUP BY r.room_id
"""

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

OfRooms = Callable[[Sequence[str]], Coroutine[Any, Any, list[pa.RecordBatch]]]


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
    lying = _by_driver(_lies(dsn))
    if lying:
        rows = [tuple(_row(finding_of(lie)).values()) for lie in lying]
        named = spark.createDataFrame(rows, spark_ddl(FINDINGS))
        return (
            named
            if hide_facts(lying)
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
    work = _dealt(spark, dsn, room_ids, tasks, also)
    return work.mapInArrow(
        _each_room(partial(_verified_all, dsn, server_name, Config.from_env())), spark_ddl(FINDINGS)
    )


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
    _by_driver(_prove(dsn))
    work = _dealt(spark, dsn, room_ids, tasks)
    rows = work.mapInArrow(
        _each_room(partial(_rebuilt_all, dsn, server_name, Config.from_env())), spark_ddl(REBUILT)
    ).collect()
    return {row["room_id"]: row["error"] for row in rows if row["error"] is not None}


def _by_driver(work: Coroutine[Any, Any, T]) -> T:
    """Run work on the database in the driver, in another thread.

    A notebook has an event loop in this one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _lies(dsn: str) -> list[Lie]:
    async with _opened(dsn, Config.from_env()) as database:
        return await lies(database)


async def _prove(dsn: str) -> None:
    async with _opened(dsn, Config.from_env()) as database:
        await prove_indexes(database, "a rebuild")


def _dealt(
    spark: SparkSession,
    dsn: str,
    room_ids: Sequence[str] | None,
    tasks: int | None,
    also: Sequence[str] = (),
) -> DataFrame:
    """Distribute the rooms to tasks by size."""
    with arrow_snapshot(dsn) as conn:
        sizes = {row["room_id"]: row["size"] for row in conn.rows(SQL_ROOM_SIZES)}
    if room_ids is not None:
        unknown = [room_id for room_id in room_ids if room_id not in sizes]
        if unknown:
            raise UnknownRoom(unknown[0])
        sizes = {room_id: sizes[room_id] for room_id in room_ids}
    count = tasks or spark.sparkContext.defaultParallelism
    dealt = deal(sizes, count, sum(sizes.values())) | dict.fromkeys(also, 0)
    frame = spark.createDataFrame(
        [(task, room_id) for room_id, task in dealt.items()], "task int, room_id string"
    )
    return frame.repartitionById(count, "task")


def _each_room(of_rooms: OfRooms) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rooms = [room_id for batch in batches for room_id in batch.column("room_id").to_pylist()]
        if rooms:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                yield from runner.run(of_rooms(rooms))

    return work


async def _verified_all(
    dsn: str, server_name: str | None, config: Config, rooms: Sequence[str]
) -> list[pa.RecordBatch]:
    async with _opened(dsn, config) as database:
        name = await local_server_name(database, server_name)
        return [
            pa.RecordBatch.from_pylist(
                [row async for row in _verified(database, room_id, name)], schema=FINDINGS
            )
            for room_id in rooms
        ]


@asynccontextmanager
async def _opened(dsn: str, config: Config) -> AsyncIterator[Database]:
    config = replace(
        config,
        statement_timeout_ms=STATEMENT_TIMEOUT_MS,
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
) -> list[pa.RecordBatch]:
    async with _opened(dsn, config) as database:
        name = await local_server_name(database, server_name)
    async with Rebuilder.opened(dsn, name, config) as rebuilder:
        done = [
            {"room_id": room_id, "error": await _error_of(rebuilder, room_id)} for room_id in rooms
        ]
    return [pa.RecordBatch.from_pylist(done, schema=REBUILT)]


async def _error_of(rebuilder: Rebuilder, room_id: str) -> str | None:
    try:
        await rebuilder.rebuild(room_id)
    except (StorageCorrupt, PartialState) as error:
        return str(error)
    return None
