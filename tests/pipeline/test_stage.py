"""Staged bytes belong to one import: its end or failure removes them, no other touches them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from pyspark.sql import SparkSession

import storage
from storage.database import Database
from storage.errors import DatabaseConflict, DatabaseUnavailable
from storage.pipeline import import_archive
from storage.pipeline.imports.stage import put, staging, work, work_for_import
from storage.testing import SHAPES, generate_room, write_ndjson
from tests.pipeline.stores import SERVER

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]
STAGED = "SELECT array_agg(DISTINCT import_number ORDER BY import_number) FROM import_events"
DRIVER = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks "
    "WHERE locktype = 'advisory' AND objid = 1919905646 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
FULL = "ALTER TABLE rooms ADD CONSTRAINT no_room CHECK (room_nid < 1)"
PEAK = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
)


@pytest.fixture
async def watcher(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


async def stage(database: Database, number: int) -> None:
    async with database.transaction() as conn:
        await work_for_import(conn, number)
        await put(conn, number, [(1, b"{}"), (2, b"{}")])


async def test_a_failed_import_leaves_nothing(
    database: Database, dsn: str, watcher: asyncpg.Connection
) -> None:
    with pytest.raises(RuntimeError, match="of a stage"), staging(dsn) as number:
        await stage(database, number)
        assert await watcher.fetchval(STAGED) == [number]
        raise RuntimeError("of a stage")
    assert await watcher.fetchval(STAGED) is None
    with pytest.raises(DatabaseConflict, match="has ended"):
        await stage(database, number)


async def test_a_second_import_leaves_the_rows_of_one_at_work_alone(
    database: Database, dsn: str, watcher: asyncpg.Connection
) -> None:
    """The first driver lost its session, and so the import lock, while one of its tasks runs."""
    with pytest.raises(DatabaseUnavailable), staging(dsn) as killed:
        await stage(database, killed)
        await watcher.execute(DRIVER)
        async with database.transaction() as conn:
            await work(conn, killed)
            with staging(dsn) as second:
                await stage(database, second)
                assert await watcher.fetchval(STAGED) == [killed, second]
            assert await watcher.fetchval(STAGED) == [killed]
        with staging(dsn):
            assert await watcher.fetchval(STAGED) is None, "nobody works with it any more"
        with pytest.raises(DatabaseConflict, match="has ended"):
            await stage(database, killed)


async def test_an_import_whose_executors_fail_leaves_nothing(
    spark: SparkSession, dsn: str, watcher: asyncpg.Connection, tmp_path: Path
) -> None:
    await watcher.execute(FULL)
    write_ndjson(generate_room(SHAPES["direct_chat"], 30, sign=False), tmp_path / "room.ndjson")
    with pytest.raises(storage.DatabaseError, match=r"in an executor: .*no_room"):
        import_archive(spark, [str(tmp_path / "room.ndjson")], dsn, server_name=SERVER)
    assert await watcher.fetchval(STAGED) is None


async def test_another_server_is_refused_before_anything_is_read(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "room.ndjson")
    write_ndjson(generate_room(SHAPES["direct_chat"], 30, sign=False), path)
    stages = list[str]()
    with pytest.raises(storage.InputError, match="the database is new: give a server name"):
        import_archive(spark, [path], dsn, stage=stages.append)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.erase_user(f"@alice:{SERVER}")  # so it is not empty, and keeps its name
    with pytest.raises(storage.WrongServerName, match=f"belongs to {SERVER}, not to another"):
        import_archive(spark, [path], dsn, server_name="another.test", stage=stages.append)
    assert stages == []


async def peak(watcher: asyncpg.Connection, work: "asyncio.Task[object]") -> int:
    most = 0
    while not work.done():
        most = max(most, await watcher.fetchval(PEAK))
        await watcher.execute("SELECT pg_sleep(0.005)")
    return most


async def test_tasks_bound_the_connections_of_every_stage(
    spark: SparkSession, dsn: str, watcher: asyncpg.Connection, tmp_path: Path
) -> None:
    """Many files, so that there would be many tasks of the first stage; Spark runs two at once."""
    (tmp_path / "files").mkdir()
    for seed in range(6):
        room = generate_room(SHAPES["small_chat"], 300, seed=seed, sign=False)
        write_ndjson(room, tmp_path / "files" / f"{seed}.ndjson")
    files = [str(tmp_path / "files")]
    importing = asyncio.create_task(
        asyncio.to_thread(
            import_archive, spark, files, dsn, server_name=SERVER, writers=1, part=100
        )
    )
    most = await peak(watcher, importing)
    assert (await importing).outcomes["stored"] == 1800
    assert 2 <= most <= 3
