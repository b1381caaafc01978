"""A task that runs twice, as with speculation: nothing is stored, staged or counted twice."""

import asyncio
from pathlib import Path

import asyncpg
import pyarrow as pa

from storage.database import Database
from storage.database.arrow_results import arrow_session
from storage.pipeline.imports.append_events import StoreTarget, TaskAttempt
from storage.pipeline.imports.intern_names import cleared
from storage.pipeline.imports.lines import found, numbered
from storage.pipeline.imports.load_rooms import load_rooms
from storage.pipeline.imports.stage import staging
from storage.pipeline.imports.validate import (
    CreatedRoom,
    LineValidator,
    RoomVersions,
    TaskValidation,
    first_place,
    scanned_range,
    stage_versions,
)
from storage.testing import SHAPES, generate_room, write_ndjson
from tests.pipeline.stores import SERVER


async def test_both_attempts_at_a_task_store_a_room_once(dsn: str, tmp_path: Path) -> None:
    """Both examine at once, then both load at once, from the bundles of one of them."""
    room = generate_room(SHAPES["direct_chat"], 60, seed=1)
    write_ndjson(room, tmp_path / "room.ndjson")
    cleared(str(tmp_path))
    [span] = found([str(tmp_path / "room.ndjson")]).ranges(1)
    count, versions = scanned_range(span)
    [numbered_span] = numbered([span], {(span.file, span.begin): count})
    with staging(dsn) as number:
        task = TaskValidation(LineValidator(versions), dsn, number, str(tmp_path))

        def examine() -> list[pa.RecordBatch]:
            return list(task.run([numbered_span]))

        def load(attempt: int) -> int:
            target = StoreTarget(dsn, SERVER)
            run = load_rooms(target, number, str(tmp_path), TaskAttempt(0, attempt), batches)
            return sum(row["events"] for batch in run for row in batch.to_pylist())

        batches, _ = await asyncio.gather(*(asyncio.to_thread(examine) for _ in range(2)))
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("SELECT count(*) FROM import_events") == len(room)
        loaded = await asyncio.gather(*(asyncio.to_thread(load, one) for one in range(2)))
    assert loaded == [len(room), len(room)]
    assert await connection.fetchval("SELECT count(*) FROM events") == len(room)
    await connection.close()


async def test_versions_of_rooms_are_staged_once(dsn: str) -> None:
    """The first create event of a room counts; a place that another room has is passed over."""
    first, second = CreatedRoom(0, 0, "!a:s1.test", "10"), CreatedRoom(1, 0, "!a:s1.test", "11")
    with arrow_session(dsn) as conn, staging(dsn) as number:
        for rooms in ([second], [second], [first], [first, second]):
            stage_versions(conn, number, rooms)
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("SELECT count(*) FROM import_events") == 2
        versions = await learned(dsn, number, "!a:s1.test")
        assert versions == {"!a:s1.test": "10"}
        place = await connection.fetchval(
            "SELECT max(place) FROM import_events WHERE import_number = $1", number
        )
        assert 0 <= place - first_place("!a:s1.test") < 1 << 20
        await connection.close()


async def learned(dsn: str, number: int, room_id: str) -> dict[str, str]:
    """Return the versions a task looks up: of a room, and of ids that Postgres cannot store."""
    async with await Database.open(dsn) as database, database.connection() as conn:
        rooms = RoomVersions(number, {})
        await rooms.learn(conn, [room_id, "!nul\0", None, "!unknown:s1.test"])
        return rooms.versions
