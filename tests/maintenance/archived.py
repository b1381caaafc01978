"""What tests of the archive share: events that are archived, and what is where."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from storage import Store
from storage.codec import Reference, StoredBytes, decode
from storage.database.archived_bytes import PREFIX
from storage.maintenance.cold_archive import archive_events, back, run, sweep
from storage.testing import RoomBuilder
from tests.maintenance.rooms import SERVER
from tests.stored_bytes import forms_of, store_plainly

USER = f"@user1:{SERVER}"

GRACE_S = 0.1
"""No reader of a test takes longer."""


PATIENT, HURRIED = 600, 1
"""How many times GRACE_S a sweep waits for old snapshots. A busy machine may stop a session that
has one; where a test holds one itself, the wait is in vain."""


def wait_for_snapshots(monkeypatch: pytest.MonkeyPatch, graces: int) -> None:
    for module in (back, run, sys.modules[sweep.__module__]):
        monkeypatch.setattr(module, "SNAPSHOT_GRACES", graces)


async def archive(store: Store, folder: str, **options: Any) -> Any:
    options = {"pack_bytes": 10_000, "older_than_ms": -1, "grace_s": GRACE_S} | options
    return await archive_events(store.database, url=folder, **options)


class BytesRow(NamedTuple):
    event_id: str
    room_id: str
    json: StoredBytes


SQL_BYTES = """
SELECT e.event_id, r.room_id, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE $1::text IS NULL OR e.event_id = $1::text
ORDER BY e.event_nid
"""


async def raw_bytes(store: Store) -> dict[str, bytes]:
    """The bytes of every event, as the package reads them, without any cache."""
    async with store.database.connection() as conn:
        rows = await conn.fetch(SQL_BYTES, None, row=BytesRow)
    return {one.event_id: decode(one.json, one.event_id, one.room_id) for one in rows}


async def raw_of(store: Store, event_id: str) -> bytes:
    async with store.database.connection() as conn:
        row = await conn.fetchrow(SQL_BYTES, event_id, row=BytesRow)
    assert row is not None
    return decode(row.json, row.event_id, row.room_id)


async def forms(store: Store) -> dict[str, Any]:
    async with store.database.connection() as conn:
        return await forms_of(conn._driver)


async def references(store: Store) -> dict[str, Reference]:
    found = {one: Reference.parse(form) for one, form in (await forms(store)).items()}
    return {one: reference for one, reference in found.items() if reference is not None}


async def pack_states(store: Store) -> list[str]:
    async with store.database.connection() as conn:
        return await conn.fetchvals("SELECT state FROM archive_packs ORDER BY pack")


def files(folder: str) -> list[Path]:
    """The files of packs, also parts of them."""
    return sorted(Path(folder).glob(f"{PREFIX}*"))


def anywhere(folder: str, text: bytes) -> bool:
    return any(text in path.read_bytes() for path in files(folder))


async def said_and_archived(store: Store, folder: str) -> tuple[RoomBuilder, list[Any]]:
    """A room whose messages are stored as plain text, so that a search finds them in files."""
    room = RoomBuilder("11")
    room.start(USER)
    said = [room.message(USER, f"secret-{number}-words") for number in range(40)]
    await store.append(room.pdus)
    await store_plainly(store.database)
    await archive(store, folder, pack_bytes=6_000)
    assert all(anywhere(folder, f"secret-{number}-words".encode()) for number in range(40))
    return room, said
