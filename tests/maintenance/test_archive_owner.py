"""A folder of packs has one owner: a copy of the database changes nothing in it."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import storage
from storage import Store
from storage.database.archived_bytes import OWNER_FILE
from storage.errors import ArchiveNotOwned, ArchiveUnavailable
from storage.maintenance.cold_archive import return_events, sweep, sweep_if_free
from storage.maintenance.purge import purge_room
from storage.testing import RoomBuilder, build_room
from tests.cli.running import room_storage_beside
from tests.maintenance.archived import (
    GRACE_S,
    archive,
    files,
    pack_states,
    raw_bytes,
    references,
    said_and_archived,
)
from tests.maintenance.object_store import ObjectStore
from tests.maintenance.rooms import LIVELY, SERVER, findings
from tests.maintenance.test_backup import run


@pytest.fixture
async def room(store: Store, folder: str) -> RoomBuilder:
    return (await said_and_archived(store, folder))[0]


@pytest.fixture
async def copy_dsn(dsn: str, empty_dsn: str, room: RoomBuilder, tmp_path: Path) -> str:
    """A copy of the database, made when the events of the room were archived."""
    dump = tmp_path / "dump"
    await asyncio.to_thread(run, "pg_dump", "--format=custom", f"--file={dump}", dsn)
    await asyncio.to_thread(run, "pg_restore", "--exit-on-error", f"--dbname={empty_dsn}", dump)
    return empty_dsn


@pytest.fixture
async def copy(copy_dsn: str) -> AsyncIterator[Store]:
    async with storage.open(copy_dsn, server_name=SERVER) as opened:
        yield opened


def content(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


async def test_a_copy_changes_no_file_of_the_original(
    store: Store, copy: Store, folder: str, tmp_path: Path
) -> None:
    before, whole = await raw_bytes(store), content(folder)
    other = tmp_path / "other"
    other.mkdir()
    async with copy.database.connection() as conn:  # as of a dump while packs were written
        await conn.execute("UPDATE archive_packs SET state = 'writing' WHERE pack % 2 = 0")
    for work in (
        return_events(copy.database, grace_s=GRACE_S),
        sweep(copy.database, grace_s=GRACE_S),
        archive(copy, folder),
        archive(copy, str(other)),
    ):
        with pytest.raises(ArchiveNotOwned, match="--take-over") as error:
            await work
        assert error.value.url == Path(folder).as_uri()
    assert content(folder) == whole
    assert content(str(other)) == {}
    assert await raw_bytes(copy) == before, "reads never check"
    assert (await return_events(store.database, grace_s=GRACE_S)).lost == 0
    assert await raw_bytes(store) == before


async def test_a_purge_in_a_copy_is_done_and_warns(
    store: Store, copy: Store, copy_dsn: str, room: RoomBuilder, folder: str
) -> None:
    before, whole = await raw_bytes(store), content(folder)
    arguments = ("purge", room.room_id, "--all", "--force")
    purged = await room_storage_beside(*arguments, STORAGE_DSN=copy_dsn)
    assert purged.returncode == 0, purged.stderr
    assert "belongs to another database" in purged.stderr
    assert "40 wait in the archive" in purged.stdout
    assert await raw_bytes(copy) == {}
    assert await sweep_if_free(copy.database) == (0, 40, 0)
    assert content(folder) == whole
    assert await raw_bytes(store) == before


async def test_a_target_of_another_database(
    store: Store, room: RoomBuilder, folder: str, another_dsn: str
) -> None:
    """Also of one that is no copy, and has no pack yet."""
    async with storage.open(another_dsn, server_name=SERVER) as other:
        await other.append(build_room(LIVELY, 60, seed=8).pdus)
        with pytest.raises(ArchiveNotOwned):
            await archive(other, folder + "/")
        assert await pack_states(other) == []
        assert await references(other) == {}


async def test_a_restored_backup_takes_over(
    store: Store, copy: Store, copy_dsn: str, room: RoomBuilder, folder: str
) -> None:
    async def command(*arguments: str) -> Any:
        return await room_storage_beside("archive", *arguments, STORAGE_DSN=copy_dsn)

    refused = await command("--sweep")
    assert refused.returncode == 2
    assert "room-storage archive --take-over" in refused.stderr
    wrong = await command("--older-than", "0", "--to", folder, "--take-over", "--dry-run")
    assert (wrong.returncode, "--dry-run" in wrong.stderr) == (2, True)
    Path(folder).rename(folder + " moved")
    assert (await command("--take-over")).returncode == 3
    Path(folder + " moved").rename(folder)
    taken = await command("--take-over")
    assert taken.returncode == 0, taken.stderr
    assert "belong to this database now" in taken.stdout
    assert await findings(copy) == []
    await purge_room(copy.database, room.room_id, server_name=SERVER, force=True)
    assert (await sweep(copy.database, grace_s=GRACE_S)).waiting == 0
    assert files(folder) == []
    with pytest.raises(ArchiveNotOwned):
        await return_events(store.database, grace_s=GRACE_S)


async def test_a_copy_goes_on_with_a_copy_of_the_folder(
    store: Store, copy: Store, folder: str, tmp_path: Path
) -> None:
    before, whole = await raw_bytes(store), content(folder)
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    async with copy.database.connection() as conn:
        await conn.execute(
            "UPDATE archive_packs SET url = replace(url, $1::text, $2::text)",
            Path(folder).as_uri(),
            own.as_uri(),
        )
    with pytest.raises(ArchiveNotOwned):
        await sweep(copy.database, grace_s=GRACE_S)
    assert (await return_events(copy.database, take_over=True, grace_s=GRACE_S)).events == 40
    assert await raw_bytes(copy) == before
    assert files(str(own)) == []
    assert content(folder) == whole


async def test_a_folder_without_owner_is_claimed(
    store: Store, copy: Store, folder: str, tmp_path: Path
) -> None:
    """If it has packs: an empty one may be a file system that is not mounted."""
    owner = Path(folder, OWNER_FILE)
    owner.unlink()
    Path(folder).rename(tmp_path / "away")
    Path(folder).mkdir()
    await sweep(copy.database, grace_s=GRACE_S)
    assert content(folder) == {}
    Path(folder).rmdir()
    Path(tmp_path / "away").rename(folder)
    await sweep(store.database, grace_s=GRACE_S)
    assert owner.exists()
    with pytest.raises(ArchiveNotOwned):
        await sweep(copy.database, grace_s=GRACE_S)
    owner.unlink()
    owner.mkdir()  # it cannot be read
    with pytest.raises(ArchiveUnavailable):
        await return_events(store.database, grace_s=GRACE_S)
    owner.rmdir()
    owner.touch()  # a disk that was full
    with pytest.raises(ArchiveNotOwned):
        await return_events(store.database, grace_s=GRACE_S)
    assert (await return_events(store.database, take_over=True, grace_s=GRACE_S)).events == 40


async def test_the_owner_of_a_folder_of_an_object_store(
    dsn: str, store: Store, another_dsn: str
) -> None:
    url = f"object-store://owned-{os.getpid()}"
    await store.append(build_room(LIVELY, 60, seed=8).pdus)
    await archive(store, url, pack_bytes=6_000)
    assert await findings(store) == []
    async with storage.open(another_dsn, server_name=SERVER) as other:
        await other.append(build_room(LIVELY, 60, seed=8).pdus)
        with pytest.raises(ArchiveNotOwned):
            await archive(other, url)
        del ObjectStore.store[f"/owned-{os.getpid()}/{OWNER_FILE}"]
        assert (await archive(other, url)).packs > 0
    with pytest.raises(ArchiveNotOwned):
        await return_events(store.database, grace_s=GRACE_S)
    returned = await return_events(store.database, take_over=True, grace_s=GRACE_S)
    assert (returned.lost, await references(store)) == (0, {})
