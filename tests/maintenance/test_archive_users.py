"""The archive for everybody else: exports, Spark, rebuilds, jobs, the command, other stores."""

import asyncio
import json
import os
import time
from functools import partial

import pytest

from storage import Store
from storage.codec.codec import REFERENCE_BYTES
from storage.database.archived_bytes import list_files, local_path
from storage.database.arrow_results import arrow_snapshot
from storage.errors import InputError
from storage.maintenance.archive import archive as export_room
from storage.maintenance.archive import rooms_to_archive
from storage.maintenance.cold_archive import return_events
from storage.maintenance.cold_archive.sweep import DAY_MS, DAYS, archive_sizes
from storage.maintenance.reencode import encode_batch
from storage.pipeline.source.rows import decoded
from storage.rebuild import Rebuilder
from storage.testing import RoomBuilder, build_room
from tests.cli.running import room_storage
from tests.maintenance.archived import (
    GRACE_S,
    archive,
    forms,
    raw_bytes,
    references,
    said_and_archived,
)
from tests.maintenance.rooms import LIVELY, SERVER, findings


@pytest.fixture
async def room(store: Store) -> RoomBuilder:
    made = build_room(LIVELY, 150, seed=8)
    await store.append(made.pdus)
    return made


async def test_a_rebuild_leaves_references_as_they_are(
    dsn: str, store: Store, room: RoomBuilder, folder: str
) -> None:
    await archive(store, folder)
    before = await forms(store)
    async with Rebuilder.opened(dsn, SERVER) as rebuilder:
        assert (await rebuilder.rebuild(room.room_id)).events == 0
    assert await forms(store) == before
    async with store.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM archive_garbage") == 0


async def test_an_export_and_a_spark_task_have_the_bytes(
    dsn: str, store: Store, room: RoomBuilder, folder: str
) -> None:
    before = await raw_bytes(store)
    async with store.database.transaction(isolation="repeatable_read") as conn:
        [one] = await rooms_to_archive(conn, [room.room_id])
        lines = [line async for page in export_room(conn, one) for line in page]
    await archive(store, folder)
    async with store.database.transaction(isolation="repeatable_read") as conn:
        assert [line async for page in export_room(conn, one) for line in page] == lines

    def task() -> dict[str, bytes]:
        with arrow_snapshot(dsn) as arrow:
            table = arrow.table(
                "SELECT e.event_id, r.room_id, e.json AS pdu FROM events e JOIN rooms r"
                " USING (room_nid)"
            )
            rows = decoded(arrow, table, "pdu").to_pylist()
        return {row["event_id"]: row["pdu"] for row in rows}

    assert await asyncio.to_thread(task) == before


async def test_encoding_again_leaves_archived_events_there(store: Store, folder: str) -> None:
    _, said = await said_and_archived(store, folder)
    before = await references(store)
    async with store.database.transaction() as conn:
        await encode_batch(conn, 0, 1_000)
    assert await references(store) == before
    assert len(before) >= len(said)


async def test_the_command(dsn: str, store: Store, room: RoomBuilder, folder: str) -> None:
    """It archives, counts in `stats`, returns, and says what is wrong with its arguments."""
    run = partial(room_storage, STORAGE_DSN=dsn)
    counted = json.loads(
        run("archive", "--older-than", "0", "--to", folder, "--dry-run", "--json").stdout
    )
    done = run("archive", "--older-than", "0d", "--to", folder)
    assert done.stdout.startswith(
        f"{counted['events']} events, {counted['bytes']:,} bytes archived"
    )
    stats = json.loads(run("stats", "--json").stdout)["archive"]
    assert (stats["packs"], stats["events"]) == (1, counted["events"])
    back = run("archive", "--back", "--json")
    assert json.loads(back.stdout)["events"] == counted["events"]
    for wrong in (
        ["--older-than", "0"],
        ["--older-than", "soon", "--to", folder],
        ["--back", "--sweep"],
        ["--pack", "1", "--sweep"],
        ["--back", "--limit", "1"],
        ["--back", "--room", "!none:s1.test"],
        ["--sweep", "--room", room.room_id],
    ):
        assert run("archive", *wrong).returncode == 2
    gone = run("archive", "--older-than", "0", "--to", folder + "/none")
    assert (gone.returncode, "not there" in gone.stderr) == (3, True)


async def test_the_estimate_is_what_archiving_takes(
    store: Store, room: RoomBuilder, folder: str
) -> None:
    """Events that stay in the table, as those of the current state, are not in it."""
    later = time.time_ns() // 1_000_000 + (DAYS + 1) * DAY_MS
    counted = await archive(store, folder, dry_run=True)
    async with store.database.connection() as conn:
        expected = await archive_sizes(conn, now_ms=later)
    assert expected.archivable == counted.events > 90
    assert expected.saving == counted.bytes - REFERENCE_BYTES * counted.events
    await archive(store, folder)
    async with store.database.connection() as conn:
        left = await archive_sizes(conn, now_ms=later)
    assert (left.events, left.archivable, left.saving) == (counted.events, 0, 0)


async def test_a_store_of_fsspec(store: Store, room: RoomBuilder) -> None:
    """A store in memory has no folders and no ranges of its own, as an object store."""
    before, url = await raw_bytes(store), f"memory://archive-{os.getpid()}"
    done = await archive(store, url)
    assert done.events > 90
    assert await raw_bytes(store) == before
    assert await findings(store) == []
    assert len(list_files(url)) == done.packs
    assert local_path(url) is None
    returned = await return_events(store.database, grace_s=GRACE_S)
    assert (returned.events, returned.packs) == (done.events, done.packs)
    with pytest.raises(InputError, match="cannot be used"):
        await archive(store, "unknown-scheme://place")
