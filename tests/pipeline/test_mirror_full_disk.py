"""A full disk under the mirror: a clear error, the last version stays, a later pass goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

import storage
from storage.errors import StorageError
from storage.pipeline import mirror
from storage.testing import SHAPES, generate_room
from tests.long_run import long_run
from tests.pipeline.mirrored import differences
from tests.pipeline.stores import SERVER
from tests.small_disks import mounted


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 600 kB."""
    with mounted("600k") as place:
        yield place


@pytest.mark.parametrize("free", [16, *(pytest.param(n, marks=long_run) for n in (0, 4, 40, 80))])
async def test_a_full_disk_under_the_mirror(dsn: str, small_disk: Path, free: int) -> None:
    """So many kilobytes are free: the files, the log or a compaction do not fit."""
    folder = small_disk / "mirror"
    rooms = [generate_room(SHAPES["small_chat"], 60, seed=seed, sign=False) for seed in range(2)]
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(rooms[0].pdus, room_version=rooms[0].room_version)
        mirror(None, dsn, str(folder), once=True)
        await store.append(rooms[1].pdus, room_version=rooms[1].room_version)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    with ballast.open("r+b") as file:
        file.truncate(ballast.stat().st_size - free * 1024)
    with pytest.raises(StorageError, match=r"(?i)cannot be written.*no space left"):
        mirror(None, dsn, str(folder), once=True)
    for table in ("events", "rooms", "memberships", "visibility", "state_changes"):
        assert DeltaTable(folder / table).to_pyarrow_table().num_rows > 0
    ballast.unlink()
    mirror(None, dsn, str(folder), once=True)
    assert await differences(dsn, folder) == {}
