"""The archive with roles: the one that archives does not see the snapshots of the homeserver."""

from pathlib import Path

import pytest

import storage
from storage import PermissionRefused
from storage.codec import Dictionary, decode, train
from storage.database import Database
from storage.maintenance.cold_archive import archive_events, return_events, sweep
from storage.maintenance.reencode import store_dictionary
from storage.testing import RoomBuilder
from tests.cli.running import room_storage
from tests.database.test_roles import Logins, logins
from tests.maintenance.archived import (
    GRACE_S,
    HURRIED,
    SQL_BYTES,
    USER,
    BytesRow,
    files,
    wait_for_snapshots,
)
from tests.maintenance.rooms import SERVER

__all__ = ["logins"]


def trained(word: str) -> Dictionary:
    return Dictionary(
        train((f'{{"{word}":{number}}}'.encode() * 20, "!room:s1.test") for number in range(200))
    )


async def test_a_snapshot_of_another_role_keeps_its_bytes(
    logins: Logins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = RoomBuilder("11")
    room.start(USER)
    said = [room.message(USER, f"word {number}") for number in range(20)]
    async with (
        storage.open(logins.runtime, server_name=SERVER) as store,
        await Database.open(logins.purger) as database,
    ):
        await store.append(room.pdus)
        await archive_events(database, older_than_ms=-1, url=str(tmp_path), grace_s=GRACE_S)
        async with store.database.transaction(isolation="repeatable_read", readonly=True) as old:
            assert await old.fetchval("SELECT count(*) FROM events") == len(room.pdus)
            with monkeypatch.context() as patch:
                wait_for_snapshots(patch, HURRIED)
                assert (await return_events(database, grace_s=GRACE_S)).events == 20
                assert (await sweep(database, grace_s=GRACE_S)).waiting == 20
            row = await old.fetchrow(SQL_BYTES, said[3].event_id, row=BytesRow)
            assert row is not None
            assert decode(row.json, row.event_id, row.room_id) == said[3].pdu
        await sweep(database, grace_s=GRACE_S)
    assert files(str(tmp_path)) == []


async def test_which_role_archives_and_trains(logins: Logins, tmp_path: Path) -> None:
    """As docs/how-to/roles.md says."""
    async with storage.open(logins.runtime, server_name=SERVER) as store:
        room = RoomBuilder("11")
        room.start(USER)
        room.message(USER, "a word")
        await store.append(room.pdus)
    for arguments in (
        ("archive", "--older-than", "0", "--to", str(tmp_path)),
        ("archive", "--back"),
    ):
        for role in ("runtime", "reader", "purger"):
            done = room_storage(*arguments, STORAGE_DSN=getattr(logins, role))
            assert done.returncode == (0 if role == "purger" else 2), (role, arguments, done.stderr)
    for role in ("runtime", "purger"):
        async with await Database.open(getattr(logins, role)) as database:
            await store_dictionary(database, trained(role), 200)
    async with await Database.open(logins.reader) as database:
        with pytest.raises(PermissionRefused):
            await store_dictionary(database, trained("reader"), 200)
