"""A bundle is missing or cut off when its room is to be loaded: nothing of the room is stored.

Running the import again completes it.
"""

import asyncio
from pathlib import Path

import pytest

import storage
from storage.errors import StorageError
from storage.pipeline.imports.append_events import StoreTarget, TaskAttempt
from storage.pipeline.imports.intern_names import FOLDER, cleared
from storage.pipeline.imports.lines import found, numbered
from storage.pipeline.imports.load_rooms import load_rooms
from storage.pipeline.imports.stage import staging
from storage.pipeline.imports.validate import LineValidator, TaskValidation, scanned_range
from storage.testing import SHAPES, GeneratedRoom, generate_room, write_ndjson

SERVER = "s1.test"


def imported(archive: Path, dsn: str, work: Path, *, cut: bool) -> int:
    """Run both stages in this process; return the number of rows that report on lines."""
    cleared(str(work))
    with staging(dsn) as number:
        looked = [(stretch, *scanned_range(stretch)) for stretch in found([str(archive)]).ranges(1)]
        counts = {(stretch.file, stretch.begin): count for stretch, count, _ in looked}
        versions = {room: version for _, _, rooms in looked for room, version in rooms.items()}
        stage = TaskValidation(LineValidator(versions), dsn, number, str(work))
        batches = list(stage.run(numbered([stretch for stretch, _, _ in looked], counts)))
        if cut:
            for file in (work / FOLDER).iterdir():
                file.write_bytes(file.read_bytes()[:-1])
        return len(
            list(load_rooms(StoreTarget(dsn, SERVER), number, str(work), TaskAttempt(0), batches))
        )


async def held(dsn: str, room: GeneratedRoom) -> int:
    async with storage.open(dsn, server_name=SERVER) as store:
        return len(await store.events([event.event_id for event in room.events]))


async def test_nothing_of_the_room_is_stored_and_the_next_import_completes(
    dsn: str, tmp_path: Path
) -> None:
    room = generate_room(SHAPES["direct_chat"], 60, seed=1)
    write_ndjson(room, tmp_path / "room.ndjson")
    with pytest.raises(
        StorageError,
        match=f"{tmp_path}, which all executors must reach, cannot be read: .* ends at",
    ):
        await asyncio.to_thread(imported, tmp_path / "room.ndjson", dsn, tmp_path, cut=True)
    assert await held(dsn, room) == 0
    assert (
        await asyncio.to_thread(imported, tmp_path / "room.ndjson", dsn, tmp_path, cut=False) == 1
    )
    assert await held(dsn, room) == len(room.events)
