"""An import whose driver, executor or database is killed midway completes at last.

Its tables are those of an undisturbed import.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import psutil
import pytest
from pyspark.sql import SparkSession

import storage
from storage.config import Config
from storage.database.embedded import EmbeddedPostgres
from storage.database.migrate import migrate
from storage.pipeline import import_archive
from storage.testing import ODD_SOME, SHAPES, GeneratedRoom, generate_room, write_ndjson
from tests.long_run import long_run
from tests.pipeline.cluster import cluster, end_all, executors, family_of
from tests.pipeline.stores import SERVER, tables

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

TELL = """
CREATE TABLE loads (transaction xid8);
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM loads WHERE transaction <> pg_current_xact_id()) THEN
        PERFORM pg_advisory_xact_lock_shared(1);
    END IF;
    INSERT INTO loads VALUES (pg_current_xact_id());
    PERFORM pg_notify('loaded', '');
    RETURN NULL;
END
$$;
CREATE TRIGGER tell AFTER INSERT ON events FOR EACH STATEMENT EXECUTE FUNCTION tell();
LISTEN loaded;
SELECT pg_advisory_lock(1)
"""
"""After the first commit the import waits: it has more to do, however late it is killed."""

GO_ON = "SELECT pg_advisory_unlock_all()"
FORGET = f"{GO_ON}; DROP TRIGGER tell ON events; DROP FUNCTION tell(); DROP TABLE loads"
ROOMS = 40


@pytest.fixture
async def rooms(another_dsn: str, tmp_path: Path) -> Sequence[GeneratedRoom]:
    """In an archive, and appended to the other database."""
    shape = SHAPES["small_chat"].replaced(odd=ODD_SOME)
    made = [
        generate_room(shape, 40, seed=seed, version=("6", "11", "12")[seed % 3], sign=False)
        for seed in range(ROOMS)
    ]
    write_ndjson((event for room in made for event in room), tmp_path / "rooms.ndjson")
    async with storage.open(another_dsn, server_name=SERVER) as store:
        for room in made:
            await store.append(room.pdus, room_version=room.room_version)
    return made


@asynccontextmanager
async def loading(
    dsn: str, folder: Path, master: str = "local[2]"
) -> AsyncIterator[tuple[Process, asyncpg.Connection]]:
    """An import in a process of its own that has committed something, and has more to do."""
    watcher = await asyncpg.connect(dsn)
    begun = asyncio.Event()
    await watcher.add_listener("loaded", lambda *_: begun.set())
    await watcher.execute(TELL)
    arguments = [
        "-m",
        "tests.pipeline.import_process",
        str(folder / "rooms.ndjson"),
        dsn,
        str(folder / "work"),
        master,
    ]
    driver = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=Path(__file__).parents[2], stdout=PIPE, stderr=STDOUT
    )
    told = asyncio.create_task(begun.wait())
    ended = asyncio.create_task(driver.wait())
    await asyncio.wait({told, ended}, timeout=240, return_when=asyncio.FIRST_COMPLETED)
    assert begun.is_set(), (await driver.communicate())[0].decode()[-3000:]
    told.cancel()
    yield driver, watcher
    await ended
    if not watcher.is_closed():
        await watcher.close()


async def test_a_killed_driver(
    spark: SparkSession, dsn: str, another_dsn: str, tmp_path: Path, rooms: Sequence[GeneratedRoom]
) -> None:
    async with loading(dsn, tmp_path) as (driver, watcher):
        local = psutil.Process(driver.pid)
        end_all(
            [local, *family_of(local)], kill=True
        )  # the JVM and its workers as well: they would go on for a while
        await driver.wait()
        whole = await watcher.fetch(
            "SELECT room_id, count(*) FROM events JOIN rooms USING (room_nid) GROUP BY room_id"
        )
        await watcher.execute(FORGET)
    held = {room.room_id: len({event.event_id for event in room}) for room in rooms}
    assert 0 < len(whole) < len(rooms)
    assert all(count == held[room_id] for room_id, count in whole), "a room is there in part"
    summary = import_archive(
        spark, [str(tmp_path / "rooms.ndjson")], dsn, server_name=SERVER, instance_name="again"
    )
    assert summary.outcomes["duplicate"] >= sum(count for _, count in whole)
    assert await tables(dsn) == await tables(another_dsn)


@long_run
async def test_a_killed_database(
    spark: SparkSession, another_dsn: str, tmp_path: Path, rooms: Sequence[GeneratedRoom]
) -> None:
    server = EmbeddedPostgres(tmp_path / "server", config=Config(embedded_fsync=False))
    dsn = server.start()
    try:
        await migrate(dsn)
        async with loading(dsn, tmp_path) as (driver, _):
            psutil.Process(server.pid).kill()
            output, _ = await driver.communicate()
        assert driver.returncode != 0
        assert "DatabaseUnavailable" in output.decode() or "CommitUnknown" in output.decode()
        assert server.start() == dsn
        watcher = await asyncpg.connect(dsn)
        stored = await watcher.fetchval("SELECT count(*) FROM events")
        await watcher.execute(FORGET)
        await watcher.close()
        assert 0 < stored < sum(map(len, rooms))
        import_archive(spark, [str(tmp_path / "rooms.ndjson")], dsn, server_name=SERVER)
        assert await tables(dsn) == await tables(another_dsn)
    finally:
        server.stop()


@long_run
async def test_a_killed_executor_of_a_cluster(
    dsn: str, another_dsn: str, tmp_path: Path, rooms: Sequence[GeneratedRoom]
) -> None:
    """Two workers, an executor each.

    The other one, or its successor, does the work of the killed one again.
    """
    with cluster(tmp_path / "cluster") as (master, workers):
        async with loading(dsn, tmp_path, master) as (driver, watcher):
            at_work = executors(workers)
            assert len(at_work) == 2
            at_work[0].kill()
            await watcher.execute(GO_ON)
            output, _ = await driver.communicate()
            await watcher.execute(FORGET)
    assert driver.returncode == 0, output.decode()[-3000:]
    assert master in output.decode()
    assert await tables(dsn) == await tables(another_dsn)
