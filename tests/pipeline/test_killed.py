"""An import whose driver is killed in mid-load is run again, and the tables are those of one that was not."""

import asyncio
import sys
from pathlib import Path

import asyncpg
import pytest
from pyspark.sql import SparkSession

import storage
from storage.pipeline import import_archive
from storage.testing import ODD_SOME, SHAPES, generate_room, write_ndjson
from tests.pipeline.stores import SERVER, tables

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

TELL = """
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_notify(''loaded'', ''''); RETURN NULL; END';
CREATE TRIGGER tell AFTER INSERT ON events FOR EACH STATEMENT EXECUTE FUNCTION tell();
LISTEN loaded
"""
FORGET = "DROP TRIGGER tell ON events; DROP FUNCTION tell()"


async def test_a_killed_import_is_run_again(spark: SparkSession, dsn: str, another_dsn: str, tmp_path: Path) -> None:
    shape = SHAPES["small_chat"].replaced(odd=ODD_SOME)
    rooms = [generate_room(shape, 40, seed=seed, version=("6", "11", "12")[seed % 3], sign=False) for seed in range(24)]
    archive = tmp_path / "rooms.ndjson"
    write_ndjson((event for room in rooms for event in room), archive)
    async with storage.open(another_dsn, server_name=SERVER) as store:
        for room in rooms:
            await store.append(room.pdus, room_version=room.room_version)
    watcher = await asyncpg.connect(dsn)
    enough = asyncio.Event()

    def listen(*_: object) -> None:
        enough.set()

    await watcher.add_listener("loaded", listen)
    await watcher.execute(TELL)
    arguments = [str(Path(__file__).with_name("import_process.py")), str(archive), dsn, str(tmp_path / "work")]
    driver = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=Path(__file__).parents[2])
    await asyncio.wait_for(enough.wait(), 240)
    driver.kill()
    await driver.wait()
    stored = await watcher.fetchval("SELECT count(*) FROM events")
    whole = await watcher.fetch("SELECT room_id, count(*) FROM events JOIN rooms USING (room_nid) GROUP BY room_id")
    await watcher.execute(FORGET)
    await watcher.close()
    summary = import_archive(spark, [str(archive)], dsn, server_name=SERVER, instance_name="again")
    held = {room.room_id: len({event.event_id for event in room}) for room in rooms}
    assert 0 < len(whole) < len(rooms)
    assert all(count == held[room_id] for room_id, count in whole), "a room is there in part"
    assert summary.outcomes["duplicate"] >= stored
    assert await tables(dsn) == await tables(another_dsn)
