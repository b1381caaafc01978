"""A restored or copied database has skipped many positions: nothing walks through them."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Config, Store
from storage.database.connection import Database
from storage.ids import UserId
from storage.maintenance.censor import remove_content
from storage.maintenance.purge import PurgeJob, purge_history, resume
from storage.maintenance.user_export.run import sent_by
from storage.streams.restore_detection import JUMP
from tests.maintenance.purging import ALICE, PurgeKilled, chat, value
from tests.maintenance.rooms import SERVER, findings
from tests.small_limits import purges_in_batches

CONFIG = Config(purge_pause_ms=0)
small_batches = purges_in_batches(20)
STATEMENTS_MAX = 1_000


class FewStatements:
    """An observer that fails once there were too many statements."""

    def __init__(self) -> None:
        self.count = 0

    def before(self, statement: str) -> None:
        self.count += 1
        assert self.count < STATEMENTS_MAX, f"too many: {statement}"

    def after(self, statement: str, seconds: float) -> None:
        """The interface of an observer."""


@pytest.fixture
def config() -> Config:
    return CONFIG


@pytest.fixture
async def watched(dsn: str) -> AsyncIterator[Database]:
    """The database of a command, which has not opened a store."""
    async with await Database.open(dsn, config=CONFIG, observer=FewStatements()) as database:
        yield database


async def copied(store: Store) -> None:
    """Have the database be a copy, as the next process finds that enters it."""
    async with store.database.connection() as conn:
        await conn.execute("UPDATE deployment SET incarnation = 'another'")


async def test_a_purge_of_a_copied_database_ends(store: Store, watched: Database) -> None:
    """The purge is the first that enters the copy, and its positions go up while it runs."""
    room = chat(60)
    await store.append(room.pdus)
    before = await value(store, "SELECT last_value FROM events_stream")
    await copied(store)
    purged = await purge_history(
        watched,
        room.room_id,
        server_name=SERVER,
        before_event_id=room.events[50].event_id,
        local=True,
    )
    assert await value(store, "SELECT last_value FROM events_stream") >= before + JUMP
    assert purged.events == 50
    assert await findings(store) == []


@pytest.mark.every_postgres
async def test_a_purge_that_is_resumed_in_a_restored_database_ends(
    dsn: str, store: Store, watched: Database
) -> None:
    """Killed, restored, more events; those that arrived between count as references."""
    room = chat(60)
    await store.append(room.pdus[:-5])

    async def kill(_: PurgeJob) -> None:
        raise PurgeKilled

    with pytest.raises(PurgeKilled):
        await purge_history(
            store.database,
            room.room_id,
            server_name=SERVER,
            before_event_id=room.events[50].event_id,
            local=True,
            watcher=kill,
        )
    async with store.database.connection() as conn:
        await conn.execute("SELECT setval('events_stream', 1::bigint << 50)")
    await store.append(room.pdus[-5:])
    done = [one async for one in resume(watched, server_name=SERVER)]
    assert [one.room_id for one in done] == [room.room_id]
    assert await findings(store) == []


async def test_the_events_of_a_user_are_found_beyond_a_gap_of_numbers(
    dsn: str, store: Store, watched: Database
) -> None:
    """Nids skip numbers, too: those that a process took and did not use."""
    room = chat(20)
    await store.append(room.pdus[:10])
    async with store.database.connection() as conn:
        await conn.execute("SELECT setval('event_nids', 1::bigint << 50)")
    async with storage.open(dsn, server_name=SERVER, instance_name="other") as other:
        await other.append(room.pdus[10:])
    assert await value(store, "SELECT max(event_nid) FROM events") > 1 << 50
    async with watched.connection() as conn:
        sent = {one["event_id"] async for one in sent_by(conn, UserId(ALICE))}
    assert sent == {one.event_id for one in room.events if one.sender == ALICE}
    removed = await remove_content(watched, UserId(ALICE))
    assert removed.removed + removed.left == len(sent)
