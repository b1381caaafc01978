"""The archive of old event bytes: nothing is lost, and what is deleted is in no file."""

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import storage
from storage import Store
from storage.codec import decode
from storage.codec.codec import REFERENCE_BYTES
from storage.database.archived_bytes import OWNER_FILE
from storage.errors import ArchiveRunning, ArchiveUnavailable, InputError, StorageCorrupt
from storage.maintenance.censor import censor
from storage.maintenance.cold_archive import return_events, sweep, sweep_if_free
from storage.maintenance.cold_archive.pack_rows import alone
from storage.maintenance.purge import purge_history, purge_room
from storage.testing import RoomBuilder, build_room
from tests.cli.running import ROOT
from tests.maintenance.archived import (
    GRACE_S,
    HURRIED,
    SQL_BYTES,
    USER,
    BytesRow,
    anywhere,
    archive,
    files,
    forms,
    pack_states,
    raw_bytes,
    raw_of,
    references,
    said_and_archived,
    wait_for_snapshots,
)
from tests.maintenance.rooms import LIVELY, SERVER, findings
from tests.persist.tables import logical_tables


@pytest.fixture
async def room(store: Store) -> RoomBuilder:
    made = build_room(LIVELY, 150, seed=8)
    await store.append(made.pdus)
    return made


async def test_archived_events_read_the_same(
    dsn: str, store: Store, room: RoomBuilder, folder: str
) -> None:
    before, tables = await raw_bytes(store), await logical_tables(store.database)
    user = next(one.sender for one in room.events if one.sender.endswith(SERVER))
    page = await store.messages(room.room_id, user, limit=100)
    done = await archive(store, folder)
    archived = await references(store)
    assert len(archived) == done.events > 90
    assert done.packs == len(files(folder)) > 2
    assert done.left == 0
    assert set(await pack_states(store)) == {"complete"}
    assert await findings(store) == []
    async with storage.open(dsn, server_name=SERVER, instance_name="other") as other:
        assert await raw_bytes(other) == before
        assert await other.messages(room.room_id, user, limit=100) == page
    await return_events(store.database, grace_s=GRACE_S)
    assert await logical_tables(store.database) == tables


async def test_what_stays_in_the_table(store: Store, room: RoomBuilder, folder: str) -> None:
    """The current state, outliers, redacted events before they are censored, and young events."""
    assert (await archive(store, folder, older_than_ms=3_600_000)).events == 0
    await archive(store, folder)
    async with store.database.connection() as conn:
        kept = set(
            await conn.fetchvals(
                "SELECT event_id FROM events e WHERE outlier OR event_nid IN"
                " (SELECT event_nid FROM current_state)"
                " OR encoding = 0 AND (redacted_by IS NOT NULL OR redacted_form)"
            )
        )
    assert len(kept) > 20
    assert not kept & set(await references(store))
    assert (await archive(store, folder)).events == 0


async def test_limit_rooms_and_dry_run(store: Store, room: RoomBuilder, folder: str) -> None:
    other = RoomBuilder("11")
    other.start(USER)
    said = [other.message(USER, f"word {number}").event_id for number in range(20)]
    await store.append(other.pdus)
    counted = await archive(store, folder, dry_run=True, room_ids=[other.room_id])
    assert (counted.events >= 20, files(folder)) == (True, [])
    assert (await archive(store, folder, limit=7, room_ids=[other.room_id])).events == 7
    done = await archive(store, folder, room_ids=[other.room_id])
    assert done.events == counted.events - 7
    found = await references(store)
    assert set(said) <= set(found)
    assert len(found) == counted.events
    with pytest.raises(storage.UnknownRoom):
        await archive(store, folder, room_ids=["!none:s1.test"])
    with pytest.raises(InputError, match="at least 0"):
        await archive(store, folder, limit=-1)


async def test_a_dry_run_checks_its_target_as_the_run_would(
    store: Store, room: RoomBuilder, folder: str
) -> None:
    """And claims nothing: the folder stays without an owner."""
    absent = f"{folder}/absent"
    for wrong in ("", absent, "nothing://at/all"):
        refusals = []
        for dry_run in (False, True):
            with pytest.raises(storage.StorageError) as refused:
                await archive(store, wrong, dry_run=dry_run)
            refusals.append((refused.type, str(refused.value)))
        assert refusals[0] == refusals[1]
    assert (await archive(store, folder, dry_run=True)).events > 0
    assert list(Path(folder).iterdir()) == []
    owner = Path(folder, OWNER_FILE)
    owner.write_text("7.5 another\n")
    for dry_run in (False, True):
        with pytest.raises(storage.ArchiveNotOwned, match=r"7\.5 another"):
            await archive(store, folder, dry_run=dry_run)
    assert owner.read_text() == "7.5 another\n"


async def test_events_return_and_packs_go(store: Store, room: RoomBuilder, folder: str) -> None:
    before, stored = await raw_bytes(store), await forms(store)
    done = await archive(store, folder)
    first = min((await references(store)).values()).pack
    one = await return_events(store.database, pack=first, grace_s=GRACE_S)
    assert (one.packs, one.lost) == (1, 0)
    assert len(files(folder)) == done.packs - 1
    rest = await return_events(store.database, grace_s=GRACE_S)
    assert one.events + rest.events == done.events
    assert files(folder) == []
    assert await pack_states(store) == []
    assert await forms(store) == stored
    assert await raw_bytes(store) == before
    with pytest.raises(InputError, match=f"no pack {first}"):
        await return_events(store.database, pack=first)


async def test_a_censored_event_is_in_no_file(store: Store, folder: str) -> None:
    room, said = await said_and_archived(store, folder)
    await store.append([room.redact(USER, said[3]).pdu])
    await censor(store.database, older_than_ms=0)
    assert (await sweep(store.database, grace_s=GRACE_S)).removed == 1
    assert not anywhere(folder, b"secret-3-words")
    assert anywhere(folder, b"secret-4-words")
    assert await findings(store) == []
    assert await raw_of(store, said[4].event_id) == said[4].pdu


async def test_a_purged_event_is_in_no_file(store: Store, folder: str) -> None:
    room, said = await said_and_archived(store, folder)
    await purge_history(
        store.database,
        room.room_id,
        server_name=SERVER,
        before_event_id=said[20].event_id,
        local=True,
    )
    swept = await sweep_if_free(store.database)
    assert swept.removed >= 19
    assert swept.packs >= 1
    assert not anywhere(folder, b"secret-5-words")
    assert anywhere(folder, b"secret-25-words")
    assert await findings(store) == []
    await purge_room(store.database, room.room_id, server_name=SERVER, force=True)
    await sweep_if_free(store.database)
    assert files(folder) == []
    assert await sweep_if_free(store.database) == (0, 0, 0)


async def test_an_old_snapshot_still_reads_what_was_purged(
    store: Store, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, said = await said_and_archived(store, folder)
    async with store.database.transaction(isolation="repeatable_read", readonly=True) as old:
        assert await old.fetchval("SELECT count(*) FROM events") > 40
        await purge_history(
            store.database,
            room.room_id,
            server_name=SERVER,
            before_event_id=said[20].event_id,
            local=True,
        )
        with monkeypatch.context() as patch:
            wait_for_snapshots(patch, HURRIED)
            swept = await sweep(store.database, grace_s=GRACE_S)
        assert swept.removed == 0
        assert swept.waiting >= 19
        row = await old.fetchrow(SQL_BYTES, said[3].event_id, row=BytesRow)
        assert row is not None
        assert decode(row.json, row.event_id, row.room_id) == said[3].pdu
    assert (await sweep(store.database, grace_s=GRACE_S)).waiting == 0
    assert not anywhere(folder, b"secret-3-words")


async def test_one_at_a_time(store: Store, room: RoomBuilder, folder: str) -> None:
    async with alone(store.database):
        for work in (archive(store, folder), sweep(store.database), return_events(store.database)):
            with pytest.raises(ArchiveRunning):
                await work
    done = await asyncio.gather(*(archive(store, folder) for _ in range(2)), return_exceptions=True)
    assert sorted(type(one).__name__ for one in done) == ["ArchiveRunning", "Archived"]
    assert await findings(store) == []


async def test_others_write_meanwhile(store: Store, folder: str) -> None:
    """Events are sent, redacted, censored and purged while others are archived and returned."""
    room = RoomBuilder("11")
    room.start(USER)
    said = [room.message(USER, f"secret {number}") for number in range(60)]
    await store.append(room.pdus)
    gone = RoomBuilder("11", seed=9)
    gone.start(USER)
    for number in range(40):
        gone.message(USER, f"purged {number}")
    await store.append(gone.pdus)

    async def change() -> None:
        for event in said[:30]:
            await store.append([room.redact(USER, event).pdu, room.message(USER).pdu])
            await censor(store.database, older_than_ms=0)
        await purge_room(store.database, gone.room_id, server_name=SERVER, force=True)

    async def move() -> None:
        while not changing.done():
            await archive(store, folder, pack_bytes=5_000)
            await return_events(store.database, grace_s=GRACE_S)

    changing = asyncio.ensure_future(change())
    await asyncio.gather(changing, move())
    await archive(store, folder)
    after = await raw_bytes(store)
    sent = {one.event_id: one.pdu for one in room.events if one not in said[:30]}
    assert sent.items() <= after.items()
    assert not set(after) - {one.event_id for one in room.events}
    assert await findings(store) == []
    await return_events(store.database, grace_s=GRACE_S)
    assert files(folder) == []


@pytest.mark.parametrize("work", ["archive", "back"])
async def test_killed_at_each_step_nothing_is_lost(
    dsn: str, store: Store, folder: str, work: str
) -> None:
    """Killed at some steps of each kind; the next run ends what the last one has begun."""
    await said_and_archived(store, folder)
    if work == "archive":
        await return_events(store.database, grace_s=GRACE_S)
    before, archived = await raw_bytes(store), set(await pack_states(store))
    codes = []
    processes = subprocess.Popen(
        [sys.executable, "-m", "tests.maintenance.archive_process", dsn, folder, work],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with processes:
        assert processes.stdin is not None
        assert processes.stdout is not None
        for step in (*range(10, 60, 6), 10_000):
            processes.stdin.write(f"{step}\n")
            processes.stdin.flush()
            codes.append(int(await asyncio.to_thread(processes.stdout.readline)))
            assert await raw_bytes(store) == before
        processes.stdin.close()
    assert codes[0] == codes[1] == -signal.SIGKILL
    assert codes[-1] == 0
    assert set(await pack_states(store)) <= {"complete"}
    assert (len(await references(store)) >= 39) == (work == "archive")
    assert archived == ({"complete"} if work == "back" else set())
    assert await findings(store) == []
    await sweep(store.database, grace_s=GRACE_S)
    await return_events(store.database, grace_s=GRACE_S)
    assert files(folder) == []
    assert await raw_bytes(store) == before


async def test_a_lost_or_damaged_pack(store: Store, room: RoomBuilder, folder: str) -> None:
    await archive(store, folder)
    found = await references(store)
    first = min(found.values())
    [event_id] = [one for one, reference in found.items() if reference == first]
    path = next(one for one in files(folder) if one.name.startswith(f"pack-{first.pack}-"))
    whole = path.read_bytes()
    damage = bytearray(whole)
    damage[first.offset + 20] ^= 1
    for data, reason in (
        (bytes(damage), "the checksum is wrong"),
        (whole[: first.offset + 10], "the pack is cut off"),
        (None, "the pack is missing"),
    ):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(StorageCorrupt, match=reason) as error:
            _ = await raw_of(store, event_id)
        assert error.value.ids["event_id"] == event_id
        assert error.value.ids["url"] == path.as_uri()
        checks = {one.check for one in await findings(store)}
        assert checks >= {"archive", "bytes"}, reason
    path.write_bytes(whole)
    assert await findings(store) == []
    stray = path.with_name("pack-999-abcdef01")
    stray.write_bytes(b"")
    assert [(one.check, one.subject) for one in await findings(store)] == [
        ("archive", (stray.as_uri(),))
    ]


async def test_a_flipped_bit_in_a_reference(store: Store, folder: str) -> None:
    """Also of events that are plain text in the pack, without a checksum of their own."""
    _, said = await said_and_archived(store, folder)
    event_id = said[9].event_id
    reference: Any = (await forms(store))[event_id]
    async with store.database.connection() as conn:
        for bit in range(8 * REFERENCE_BYTES):
            flipped = bytearray(reference)
            flipped[bit // 8] ^= 1 << bit % 8
            await conn.execute(
                "UPDATE events SET json = $1::bytea WHERE event_id = $2::text",
                bytes(flipped),
                event_id,
            )
            with pytest.raises(StorageCorrupt) as error:
                await raw_of(store, event_id)
            assert error.value.ids["event_id"] == event_id


async def test_a_folder_that_is_not_there(store: Store, room: RoomBuilder, folder: str) -> None:
    """It is another error than a lost pack: nothing is wrong with the events."""
    with pytest.raises(ArchiveUnavailable, match="not there"):
        await archive(store, folder + "/none")
    assert await pack_states(store) == []
    await archive(store, folder)
    event_id = next(iter(await references(store)))
    Path(folder).rename(folder + " moved")
    with pytest.raises(ArchiveUnavailable, match="not there"):
        await raw_of(store, event_id)
    Path(folder + " moved").rename(folder)
    assert await raw_of(store, event_id)
    Path(folder).rename(folder + "-moved")
    async with store.database.connection() as conn:
        with pytest.raises(ArchiveUnavailable, match="not there"):
            await conn.fetch(SQL_BYTES, event_id, row=BytesRow)
        await conn.execute(
            "UPDATE archive_packs SET url = replace(url, $1::text, $2::text)",
            Path(folder).as_uri(),
            Path(folder + "-moved").as_uri(),
        )
        assert await conn.fetch(SQL_BYTES, event_id, row=BytesRow)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files of this process cannot grow beyond some bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


async def test_a_full_disk(store: Store, room: RoomBuilder, folder: str, small_files: None) -> None:
    before = await raw_bytes(store)
    with pytest.raises(ArchiveUnavailable, match="File too large"):
        await archive(store, folder, pack_bytes=1 << 20)
    assert files(folder) == []
    assert await pack_states(store) == []
    assert await raw_bytes(store) == before
    assert await references(store) == {}
