"""The trigger availableNow: batches of the requested size, up to the streams' positions at start.

The same holds after a kill.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen

import psutil
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import storage
from storage.pipeline.source.filters import Options
from storage.pipeline.source.stream import EventStream
from storage.testing import SHAPES, GeneratedRoom, generate_room
from tests.cli.running import room_storage
from tests.long_run import long_run
from tests.pipeline.cluster import end_all, family_of
from tests.pipeline.java import COMMAND
from tests.pipeline.stores import SERVER

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]
ROOMS, EVENTS, BATCH = 4, 90, 40


async def append(dsn: str, rooms: Sequence[GeneratedRoom], first: int, last: int) -> None:
    """Some events of each room, by a writer for each room."""
    for number, room in enumerate(rooms):
        async with storage.open(dsn, server_name=SERVER, instance_name=f"w{number % 2}") as store:
            await store.append(room.pdus[first:last], room_version=room.room_version)


@pytest.fixture
def rooms() -> Sequence[GeneratedRoom]:
    return [
        generate_room(SHAPES["small_chat"], EVENTS, seed=seed, sign=False) for seed in range(ROOMS)
    ]


async def test_batches_end_where_the_streams_were(dsn: str, rooms: Sequence[GeneratedRoom]) -> None:
    await append(dsn, rooms, 0, 60)
    stream = EventStream(
        Options(dsn, columns=("event_id",), partitions=2, max_events_per_batch=BATCH)
    )
    stream.prepareForTriggerAvailableNow()
    await append(dsn, rooms, 60, 90)
    limit = stream.getDefaultReadLimit()
    assert limit == ReadMaxRows(BATCH)
    at, batches = stream.initialOffset(), list[list[str]]()
    while (end := stream.latestOffset(at, limit)) != at:
        parts = stream.partitions(at, end)
        batches.append(
            [
                one
                for part in parts
                for batch in stream.read(part)
                for one in batch.column("event_id").to_pylist()
            ]
        )
        at = end
    assert [len(batch) for batch in batches] == [BATCH] * (ROOMS * 60 // BATCH)
    assert {one for batch in batches for one in batch} == {
        event.event_id for room in rooms for event in room.events[:60]
    }
    assert stream.latestOffset(at, ReadAllAvailable()) == at


@long_run
async def test_a_killed_command_goes_on_where_it_was(
    spark: SparkSession, dsn: str, tmp_path: Path, rooms: Sequence[GeneratedRoom]
) -> None:
    """The query is killed after some batches, one of them written but not committed.

    In the end each row is there once.
    """
    await append(dsn, rooms, 0, EVENTS)
    path, commits = tmp_path / "out", tmp_path / "out" / "_checkpoint" / "commits"
    arguments = [
        "spark",
        "stream",
        str(path),
        "--dsn",
        dsn,
        "--once",
        "--batch",
        str(BATCH),
        "--master",
        "local[1]",
        *COMMAND,
        "--json",
    ]
    process = Popen([sys.executable, "-m", "storage", *arguments], stdout=PIPE, stderr=PIPE)
    # Another program writes the file.
    while not (commits / "2").exists() and process.poll() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    command = psutil.Process(process.pid)
    family = [command, *family_of(command)]
    end_all(family, kill=True)
    psutil.wait_procs(family, timeout=30)
    process.communicate()
    done = [int(one.name) for one in commits.iterdir() if one.name.isdecimal()]
    assert 2 < len(done) < ROOMS * EVENTS // BATCH, "it had more to do"
    for left in (f"{max(done)}", f".{max(done)}.crc"):
        (commits / left).unlink(missing_ok=True)
    resumed = room_storage(*arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["batches"] >= 2
    assert (
        len([one for one in commits.iterdir() if one.name.isdecimal()]) >= ROOMS * EVENTS // BATCH
    )
    ids = [row.event_id for row in spark.read.parquet(str(path)).select("event_id").collect()]
    assert len(ids) == len(set(ids)) == ROOMS * EVENTS
