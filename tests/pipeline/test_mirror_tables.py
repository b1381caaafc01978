"""The tables of a mirror on Spark: wide passes, versions, and what is refused."""

import asyncio
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

import storage
from storage.errors import ExtraMissing, InputError, StorageError
from storage.pipeline import answers, mirror, mirrored
from storage.pipeline.lake import bulk, event_pass
from storage.pipeline.lake.delta_table import LakeTable, MirrorState
from storage.pipeline.lake.rounds import MirrorPass
from storage.pipeline.lake.tables import EVENTS, ROOMS
from storage.rebuild import rebuild
from storage.testing import SHAPES, generate_room
from tests.long_run import long_run
from tests.pipeline.mirrored import differences
from tests.pipeline.stores import SERVER, fill

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

OTHER = pa.table({"number": [1]})


async def small(dsn: str, events: int = 40, seed: int = 5) -> None:
    await fill(dsn, generate_room(SHAPES["small_chat"], events, seed=seed, sign=False))


async def test_tasks_of_spark_write_a_wide_pass(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark reads a table as of the last commit, and as of an earlier one."""
    monkeypatch.setattr(event_pass, "WIDE", 10)
    for seed in range(2):
        await small(dsn, 30, seed)
    mirror(spark, dsn, str(tmp_path), once=True, tasks=2)
    assert await differences(dsn, tmp_path) == {}
    events = mirrored(spark, str(tmp_path), "events")
    assert events.where(events.day > "2000-01-01").count() == 60
    assert mirrored(spark, str(tmp_path), "events", version=0).count() == 0
    with pytest.raises(InputError, match="no such table or version"):
        mirrored(spark, str(tmp_path), "events", version=10_000)


async def test_versions_that_are_none_or_none_any_more(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    began = datetime.now(UTC)
    await small(dsn)
    mirror(None, dsn, str(tmp_path), ("rooms",), once=True)
    assert mirrored(spark, str(tmp_path), "rooms", version=1).count() == 1
    assert mirrored(spark, str(tmp_path), "rooms", version=datetime.now(UTC)).count() == 1
    assert mirrored(spark, str(tmp_path), "rooms", version=datetime.now()).count() == 1  # noqa: DTZ005
    with pytest.raises(InputError, match="the first version that is left is of 20"):
        mirrored(spark, str(tmp_path), "rooms", version=began)
    for version in (-1, True, "yesterday"):
        with pytest.raises(InputError, match="a number from 0 on, or a datetime"):
            mirrored(spark, str(tmp_path), "rooms", version=version)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has one table: give one of events, state_changes"):
        mirrored(spark, str(tmp_path), "all")
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(generate_room(SHAPES["direct_chat"], 9, seed=6, sign=False).pdus)
    mirror(None, dsn, str(tmp_path), ("rooms",), once=True, keep_hours=0)
    with pytest.raises(InputError, match="files of this version are deleted"):
        mirrored(spark, str(tmp_path), "rooms", version=1)
    assert mirrored(spark, str(tmp_path), "rooms").count() == 2


async def test_the_log_stays_as_long_as_the_files(dsn: str, tmp_path: Path) -> None:
    """Also where a later run keeps versions longer than the first."""
    await small(dsn)
    for keep_hours in (1, 500, 0):
        mirror(None, dsn, str(tmp_path), ("rooms",), once=True, keep_hours=keep_hours)
    DeltaTable(tmp_path / "rooms").create_checkpoint()
    for file in (tmp_path / "rooms" / "_delta_log").iterdir():
        os.utime(file, (time.time() - 7_200,) * 2)
    DeltaTable(tmp_path / "rooms").cleanup_metadata()
    assert DeltaTable(tmp_path / "rooms", version=0).version() == 0
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(generate_room(SHAPES["direct_chat"], 9, seed=6, sign=False).pdus)
    mirror(None, dsn, str(tmp_path), once=True)
    assert await differences(dsn, tmp_path) == {}


def test_a_vacuum_deletes_no_file_of_another_process(tmp_path: Path) -> None:
    """Where versions are deleted while a mirror runs, one of the two fails, and no row is lost."""
    columns = {field.name: pa.nulls(1, field.type) for field in ROOMS.schema}
    rows = pa.table(columns | {"room_nid": pa.array([1])}, schema=ROOMS.schema)
    one, other = (LakeTable.open(str(tmp_path), ROOMS, "here", 1) for _ in range(2))
    one.commit([rows], MirrorState("s1"))
    with pytest.raises(StorageError, match="another process has written"):
        other.commit([rows], MirrorState("s1"))
    other = LakeTable.open(str(tmp_path), ROOMS, "here", 1)
    other.commit([rows], MirrorState("s2"), deleted=[1])
    with pytest.raises(StorageError, match="another process has written"):
        one.vacuum(0)
    newest = LakeTable.open(str(tmp_path), ROOMS, "here", 1)
    assert newest.rows(["room_nid"]).num_rows == 1
    assert len(newest.vacuum(0)) == 2
    assert newest.rows(["room_nid"]).num_rows == 1


async def test_a_count_reads_footers_only(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    """All pages of the files are overwritten: a count does not notice, a read of a column does."""
    await small(dsn)
    mirror(None, dsn, str(tmp_path), once=True)
    for file in (tmp_path / "events").rglob("*.parquet"):
        whole = file.read_bytes()
        footer = 8 + int.from_bytes(whole[-8:-4], "little")
        file.write_bytes(b"PAR1" + bytes(len(whole) - footer - 4) + whole[-footer:])
    events = mirrored(spark, str(tmp_path), "events")
    assert events.count() == 40
    assert events.groupBy("day").count().collect()[0]["count"] == 40
    with pytest.raises(Exception, match=r"event_id|Parquet|FAILED_READ"):
        events.select("event_id").collect()


@long_run
async def test_tasks_of_spark_write_tables_of_rooms(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "FEW_ROOMS", 1)
    for seed in range(3):
        await small(dsn, 30, seed)
    mirror(spark, dsn, str(tmp_path), once=True, tasks=2)
    assert await differences(dsn, tmp_path) == {}


async def test_a_mirror_follows_until_it_is_stopped(dsn: str, tmp_path: Path) -> None:
    loop, read, stop = asyncio.get_running_loop(), asyncio.Queue[int](), threading.Event()

    def report(made: MirrorPass) -> None:
        if made.table == "events":
            loop.call_soon_threadsafe(read.put_nowait, made.rows)

    await small(dsn, 20, 1)
    running = asyncio.create_task(
        asyncio.to_thread(mirror, None, dsn, str(tmp_path), every_s=0.01, stop=stop, report=report)
    )
    assert await read.get() == 20
    await small(dsn, 15, 2)
    rows = 0
    while rows < 15:
        rows += await read.get()
    stop.set()
    await running
    assert rows == 15
    assert DeltaTable(tmp_path / "events").count() == 35
    assert set(await differences(dsn, tmp_path)) <= {"memberships", "visibility", "rooms"}


async def test_a_comparison_makes_a_damaged_mirror_equal(dsn: str, tmp_path: Path) -> None:
    await small(dsn)
    mirror(None, dsn, str(tmp_path), once=True)
    lake = opened(tmp_path, await deployment(dsn))
    arrived = lake.rows(["arrived"]).column(0).to_pylist()
    state = lake.state()
    assert state is not None
    lake.commit([], state, arrived[3:9])
    assert set(await differences(dsn, tmp_path)) == {"events"}
    mirror(None, dsn, str(tmp_path), once=True)
    assert set(await differences(dsn, tmp_path)) == {"events"}
    mirror(None, dsn, str(tmp_path), once=True, compare=True)
    assert await differences(dsn, tmp_path) == {}


async def test_a_folder_of_any_name(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    """Spark reads no character of it as a pattern or an escape."""
    await small(dsn)
    folder = tmp_path / "my {a,b} [x] é*"
    mirror(None, dsn, str(folder), once=True)
    assert mirrored(spark, str(folder), "events").count() == 40
    for days_read in (1, 0):
        found = answers(spark, str(folder), ("activity", "servers"))
        assert found["activity"].days_read == days_read
        assert found["activity"].rows.count() > 0
    with pytest.raises(InputError, match="no part of the path may have # or %"):
        mirror(None, dsn, str(tmp_path / "a#b" / "c%20d"), once=True)


async def test_a_rebuild_of_visibility_is_followed(dsn: str, tmp_path: Path) -> None:
    room = generate_room(SHAPES["small_chat"], 40, seed=5, sign=False)
    await fill(dsn, room)
    async with storage.open(dsn, server_name=SERVER) as store:
        async with store.database.connection() as conn:
            await conn.execute("DELETE FROM visibility")
        mirror(None, dsn, str(tmp_path), once=True)
        assert DeltaTable(tmp_path / "visibility").count() == 0
        await rebuild(store.database, room.room_id, server_name=SERVER)
        mirror(None, dsn, str(tmp_path), once=True)
        assert DeltaTable(tmp_path / "visibility").count() > 0
        assert await differences(dsn, tmp_path) == {}


async def test_a_restored_database_needs_a_comparison(dsn: str, tmp_path: Path) -> None:
    await small(dsn)
    mirror(None, dsn, str(tmp_path), once=True)
    async with storage.open(dsn, server_name=SERVER) as store, store.database.connection() as conn:
        await conn.execute(
            "INSERT INTO lost_positions (stream_name, lost_after, lost_upto) "
            "SELECT 'events', 10, max(stream_id) + 10 FROM stream_positions"
        )
    with pytest.raises(storage.errors.ResyncNeeded, match="--compare"):
        mirror(None, dsn, str(tmp_path), once=True)


async def test_the_second_of_two_writers_fails(dsn: str, tmp_path: Path) -> None:
    await small(dsn)
    mirror(None, dsn, str(tmp_path), once=True)
    deployment_id = await deployment(dsn)
    one, other = opened(tmp_path, deployment_id), opened(tmp_path, deployment_id)
    state = MirrorState("s1")
    one.commit([], state)
    with pytest.raises(StorageError, match="another process has written"):
        other.commit([], state)


async def test_another_folder_is_refused(dsn: str, tmp_path: Path) -> None:
    await small(dsn)
    write_deltalake(tmp_path / "foreign" / "rooms", OTHER)
    with pytest.raises(InputError, match="another program"):
        mirror(None, dsn, str(tmp_path / "foreign"), ("rooms",), once=True)
    opened(tmp_path / "another", "another")
    with pytest.raises(InputError, match="mirrors the database another"):
        mirror(None, dsn, str(tmp_path / "another"), once=True)


async def test_a_mirror_of_another_version_is_refused(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await small(dsn)
    monkeypatch.setattr("storage.pipeline.lake.delta_table.SCHEMA_VERSION", 0)
    mirror(None, dsn, str(tmp_path), ("rooms",), once=True)
    monkeypatch.undo()
    with pytest.raises(InputError, match="has version 0 of the mirror's schema"):
        mirror(None, dsn, str(tmp_path), ("rooms",), once=True)


@pytest.mark.parametrize(
    "tables,said", [(("event",), "no table event:"), ((), "no table without a name")]
)
def test_unknown_tables(tables: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        mirror(None, "postgresql:///none", str(tmp_path), tables)


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ExtraMissing, match=r"room-storage\[lake\]"):
        mirror(None, "postgresql:///none", str(tmp_path), once=True)


def test_numbers_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch, tasks"):
        mirror(None, "postgresql:///none", str(tmp_path), batch=0)


def opened(folder: Path, deployment_id: str) -> LakeTable:
    table = ROOMS if deployment_id == "another" else EVENTS
    return LakeTable.open(str(folder), table, deployment_id, 1)


async def deployment(dsn: str) -> str:
    async with storage.open(dsn, server_name=SERVER) as store:
        return store.deployment_id
