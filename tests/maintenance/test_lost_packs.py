"""Packs whose file is missing: the work on the archive goes on with the others."""

import json
import os
from pathlib import Path

import pytest

from storage import Store
from storage.errors import StorageCorrupt
from storage.maintenance.censor import censor
from storage.maintenance.cold_archive import return_events, sweep, sweep_if_free
from storage.maintenance.purge import purge_history, purge_room
from storage.testing import build_room
from tests.cli.running import room_storage_beside
from tests.maintenance.archived import (
    GRACE_S,
    USER,
    anywhere,
    archive,
    files,
    pack_states,
    raw_bytes,
    raw_of,
    references,
    said_and_archived,
)
from tests.maintenance.object_store import ObjectStore
from tests.maintenance.rooms import LIVELY, SERVER, findings


async def lose_first(store: Store, folder: str) -> tuple[int, Path, bytes]:
    """Remove the file of the first pack; return its number, path and bytes."""
    pack = min((await references(store)).values()).pack
    [path] = [one for one in files(folder) if one.name.startswith(f"pack-{pack}-")]
    data = path.read_bytes()
    path.unlink()
    return pack, path, data


async def test_the_sweep_goes_on_with_other_packs(
    store: Store, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The notes of a missing pack wait: the file may come back from a backup."""
    room, said = await said_and_archived(store, folder)
    _, path, data = await lose_first(store, folder)
    await purge_history(
        store.database,
        room.room_id,
        server_name=SERVER,
        before_event_id=said[5].event_id,
        local=True,
    )
    swept = await sweep(store.database, grace_s=GRACE_S)
    assert swept.removed == 0
    assert swept.waiting >= 4
    assert "is missing" in caplog.text
    await store.append([room.redact(USER, said[25]).pdu])
    await censor(store.database, older_than_ms=0)
    assert (await sweep(store.database, grace_s=GRACE_S)).removed == 1
    assert not anywhere(folder, b"secret-25-words")
    assert anywhere(folder, b"secret-35-words")
    path.write_bytes(data)
    assert (await sweep(store.database, grace_s=GRACE_S)).waiting == 0
    assert not anywhere(folder, b"secret-3-words")
    assert await findings(store) == []


async def test_a_missing_pack_goes_with_its_last_event(dsn: str, store: Store, folder: str) -> None:
    room, _ = await said_and_archived(store, folder)
    await lose_first(store, folder)
    await purge_room(store.database, room.room_id, server_name=SERVER, force=True)
    result = await room_storage_beside("archive", "--sweep", STORAGE_DSN=dsn)
    assert result.returncode == 0, result.stderr
    assert await sweep_if_free(store.database) == (0, 0, 0)
    assert await pack_states(store) == []
    assert await findings(store) == []


async def test_an_empty_folder_may_be_a_file_system_that_is_not_mounted(
    store: Store, folder: str
) -> None:
    room, _ = await said_and_archived(store, folder)
    Path(folder).rename(folder + " moved")
    Path(folder).mkdir()
    await purge_room(store.database, room.room_id, server_name=SERVER, force=True)
    assert await sweep(store.database, grace_s=GRACE_S) == (0, 40, 0)
    Path(folder).rmdir()
    Path(folder + " moved").rename(folder)
    assert anywhere(folder, b"secret-3-words")
    await sweep(store.database, grace_s=GRACE_S)
    assert files(folder) == []
    assert await pack_states(store) == []


async def test_events_of_other_packs_return(store: Store, folder: str) -> None:
    await said_and_archived(store, folder)
    before, found = await raw_bytes(store), await references(store)
    pack, path, data = await lose_first(store, folder)
    with pytest.raises(StorageCorrupt, match="the pack is missing") as error:
        await return_events(store.database, grace_s=GRACE_S)
    assert error.value.ids["pack"] == pack
    left = await references(store)
    assert left == {one: reference for one, reference in found.items() if reference.pack == pack}
    assert files(folder) == []
    path.write_bytes(data)
    await return_events(store.database, grace_s=GRACE_S)
    assert await raw_bytes(store) == before


async def test_events_return_next_to_a_pack_that_was_never_written(
    store: Store, folder: str, tmp_path: Path
) -> None:
    """As where a folder went away while a pack was written there."""
    await said_and_archived(store, folder)
    async with store.database.connection() as conn:
        await conn.execute(
            "INSERT INTO archive_packs (pack, state, url, bytes, events, created_ts)"
            " VALUES (999, 'writing', $1::text, 8, 1, 0)",
            (tmp_path / "none" / "pack-999-abcdef01").as_uri(),
        )
    returned = await return_events(store.database, grace_s=GRACE_S)
    assert (returned.events, returned.lost) == (40, 0)
    assert await references(store) == {}


async def test_a_lost_pack_of_a_killed_run(store: Store, folder: str) -> None:
    """Other events are archived and returned; the pack is finished once its file is back."""
    await said_and_archived(store, folder)
    pack, path, data = await lose_first(store, folder)
    async with store.database.connection() as conn:
        await conn.execute("UPDATE archive_packs SET state = 'filling' WHERE pack = $1::int", pack)
    await archive(store, folder)
    assert "filling" in await pack_states(store)
    path.write_bytes(data)
    await archive(store, folder)
    assert set(await pack_states(store)) == {"complete"}
    assert await findings(store) == []


async def test_a_pack_of_an_object_store_that_is_cut_off_or_comes_back(store: Store) -> None:
    """It is damage, and no outage of the store."""
    url = f"object-store://archive-{os.getpid()}"
    await store.append(build_room(LIVELY, 60, seed=8).pdus)
    await archive(store, url, pack_bytes=6_000)
    before, found = await raw_bytes(store), await references(store)
    last = max(found.values())
    [event_id] = [one for one, reference in found.items() if reference == last]
    [path] = [one for one in ObjectStore.store if f"/pack-{last.pack}-" in one]
    whole = ObjectStore.store[path]
    for size in (last.offset, 20, 0):
        ObjectStore().pipe_file(path, whole.getvalue()[:size])
        with pytest.raises(StorageCorrupt, match="the pack is cut off"):
            await raw_of(store, event_id)
        assert {one.check for one in await findings(store)} >= {"archive", "bytes"}
    del ObjectStore.store[path]
    assert {one.check for one in await findings(store)} >= {"archive", "bytes"}
    ObjectStore.store[path] = whole
    assert await findings(store) == []
    await return_events(store.database, grace_s=GRACE_S)
    assert await raw_bytes(store) == before


async def test_a_purge_says_what_it_did_if_the_archive_cannot_be_reached(
    dsn: str, store: Store, folder: str
) -> None:
    room, _ = await said_and_archived(store, folder)
    Path(folder).rename(folder + " moved")
    arguments = ("purge", room.room_id, "--all", "--force", "--json")
    result = await room_storage_beside(*arguments, STORAGE_DSN=dsn)
    assert result.returncode == 0, result.stderr
    assert "the folder is not there" in result.stderr
    document = json.loads(result.stdout)
    assert document["rooms"][0]["events"] == 45
    assert document["archive"]["waiting"] == 40
    Path(folder + " moved").rename(folder)
    await sweep(store.database, grace_s=GRACE_S)
    assert files(folder) == []
