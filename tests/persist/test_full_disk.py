"""A full disk: a clear error, no partial writes, the same append succeeds once space is freed."""

import os
import random
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

import storage
from storage.database.migrate import migrate
from storage.testing import RoomBuilder
from tests.mortal import mortal_postgres
from tests.persist.tables import row_counts
from tests.postgres import with_database
from tests.small_disks import grow, mounted


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 24 MB, where the server's user can reach it."""
    with mounted("24M") as place:
        yield place


@pytest.fixture
async def small_dsn(small_disk: Path) -> AsyncIterator[str]:
    """A migrated database on the small disk, of a server of its own.

    On the shared server a checkpoint fails while the disk is full, and with it whatever another
    test waits for (DROP DATABASE asks for one).
    """
    with mortal_postgres() as server:
        server_dsn = server.start()
        connection = await asyncpg.connect(server_dsn)
        backend = Path(f"/proc/{await connection.fetchval('SELECT pg_backend_pid()')}")
        inside = small_disk / "tables"
        inside.mkdir(mode=0o700)
        os.chown(inside, backend.stat().st_uid, -1)
        await connection.execute(f"CREATE TABLESPACE small LOCATION '{inside}'")
        await connection.execute(
            "CREATE DATABASE small TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C' TABLESPACE small"
        )
        await connection.close()
        dsn = with_database(server_dsn, "small")
        await migrate(dsn)
        yield dsn


async def test_a_full_disk_loses_nothing(small_dsn: str, small_disk: Path) -> None:
    room = RoomBuilder("11", seed=1, sign=False)
    room.start(room.user(1))
    rng = random.Random(1)
    for _ in range(800):
        room.message(room.user(1), b64encode(rng.randbytes(37_500)).decode())
    async with storage.open(small_dsn, server_name="s1.test") as store:
        stored = 0
        with pytest.raises(storage.DatabaseFull):
            for at in range(0, len(room.pdus), 20):
                stored += len(await store.append(room.pdus[at : at + 20]))
        assert 0 < stored < len(room.pdus)
        # before the count, which may have to write a changed page to have a free buffer
        grow(small_disk, "300M")
        assert (await row_counts(store.database))["events"] == stored
        results = await store.append(room.pdus)
        assert [result.outcome for result in results] == ["duplicate"] * stored + ["stored"] * (
            len(room.pdus) - stored
        )
        assert await store.current_state(room.room_id) == dict(room.state)
