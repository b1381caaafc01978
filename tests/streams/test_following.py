"""A process follows the others through the database, also past failures and damaged rows."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

import storage
from storage import EventId, Store
from storage.config import Config
from storage.rebuild.client_positions import SQL_AUTHOR
from storage.store.open import running
from storage.streams.feed import Advance
from storage.streams.invalidate_caches import register_writer
from storage.streams.position_poller import SQL_POSITIONS, FollowedPositionRow, follow_once
from storage.testing import signing_key

SERVER = "s1.test"
ALICE = "@alice:s1.test"
QUIET = Config(follow_ms=3_600_000, prepare_ahead=False)
READER = replace(QUIET, cache_reads=True)
IMPATIENT = replace(QUIET, lock_timeout_ms=200)
OFTEN = replace(QUIET, follow_ms=10)
SQL_END_SESSIONS = """
SELECT pg_terminate_backend(pid)
FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'room-storage second%'
"""
SQL_DAMAGE = "UPDATE events SET json = $2::bytea WHERE event_id = $1::text"


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(
        dsn, server_name=SERVER, config=QUIET, signing_key=signing_key(SERVER)
    ) as opened:
        yield opened


class Followed:
    """The rows of events that the feed of a store has published, by event id."""

    def __init__(self, store: Store) -> None:
        self.rows: dict[EventId, list[object]] = {}
        self._more = asyncio.Event()
        store.streams.feed.subscribe(self._told)

    def _told(self, advance: Advance) -> None:
        if advance.stream_name == "events":
            self.rows.update((fact.row[0], list(fact.row)) for fact in advance.rows)
            self._more.set()

    async def reached(self, event_id: EventId | None) -> None:
        """Wait for an event."""
        while event_id not in self.rows:
            self._more.clear()
            await self._more.wait()


async def test_polls_go_on_after_a_connection_whose_settings_are_wrong_for_a_moment(
    dsn: str, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As while a file of TLS is replaced: opening a connection raises `InputError`."""
    async with (
        asyncio.timeout(60),
        storage.open(dsn, server_name=SERVER, instance_name="second", config=OFTEN) as second,
    ):
        followed, errors = Followed(second), second.database.measures.database_errors
        monkeypatch.setenv("PGSSLMODE", "of yesterday")
        async with store.database.connection() as conn:
            while not errors["InputError"]:  # a session may just have been opened
                await conn.execute(SQL_END_SESSIONS)
                await asyncio.sleep(0.01)
        monkeypatch.delenv("PGSSLMODE")
        room_id = await store.create_room(ALICE)
        sent = await store.send(room_id, ALICE, "m.room.message", {"body": "x"})
        await followed.reached(sent.event_id)
    assert "the positions of the streams cannot be read: the DSN for" in caplog.text
    assert "the database is back" in caplog.text


@pytest.mark.parametrize(
    "damaged",
    [b"\x00\xff\x00", b"{half", b"[]", b"[" * 60_000],
    ids=["form", "json", "list", "deep"],
)
async def test_a_redaction_that_cannot_be_decoded_keeps_nobody_back(
    dsn: str, store: Store, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    """The fact has no target. The stream "caches" names the target too, so no cache is stale."""
    async with storage.open(
        dsn, server_name=SERVER, instance_name="second", config=READER
    ) as second:
        followed = Followed(second)
        room_id = await store.create_room(ALICE)
        sent = await store.send(room_id, ALICE, "m.room.message", {"body": "x"})
        await follow_once(second.database, second.streams)
        cached = await second.event(sent.event_id)
        assert cached is not None
        assert cached.redacted_by is None
        gone = await store.send(room_id, ALICE, "m.room.redaction", {}, redacts=sent.event_id)
        later = await store.send(room_id, ALICE, "m.room.message", {"body": "later"})
        async with store.database.connection() as conn:
            await conn.execute(SQL_DAMAGE, gone.event_id, damaged)
        await follow_once(second.database, second.streams)
        assert followed.rows[gone.event_id][-2:] == [None, None]
        assert later.event_id in followed.rows
        read = await second.event(sent.event_id)
        assert read is not None
        assert read.redacted_by == gone.event_id
    assert f"the target of the redaction {gone.event_id} is not known: " in caplog.text


async def positions(store: Store) -> dict[str, int]:
    """The stored positions in the stream "events", by writer."""
    async with store.database.connection() as conn:
        return {
            row.instance_name: row.stream_id
            for row in await conn.fetch(SQL_POSITIONS, row=FollowedPositionRow)
            if row.stream_name == "events"
        }


async def test_a_poll_skips_locked_positions_and_the_next_one_moves_them(
    dsn: str, store: Store
) -> None:
    """A repair locks the positions of its writer. Others are moved, and facts are read."""
    await register_writer(store.database)
    async with storage.open(
        dsn, server_name=SERVER, instance_name="second", config=IMPATIENT
    ) as second:
        followed = Followed(second)
        async with store.database.transaction() as conn:
            assert await conn.fetchvals(SQL_AUTHOR, "maintenance")
            before = (await positions(store))["maintenance"]
            room_id = await store.create_room(ALICE)
            sent = await store.send(room_id, ALICE, "m.room.message", {"body": "x"})
            await follow_once(second.database, second.streams)
            assert sent.event_id in followed.rows
            last = sent.stream_ordering
            expected = {"main": last, "second": last, "maintenance": before}
            assert await positions(store) == expected
        await follow_once(second.database, second.streams)
        assert await positions(store) == {**expected, "maintenance": last}


async def test_the_failure_of_a_background_task_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def fails() -> None:
        ended.set()
        raise ZeroDivisionError

    # or else `no_stray_exceptions` fails this test
    monkeypatch.setattr(logging.getLogger("storage.store.open"), "handlers", [])
    async with running(fails()):
        await ended.wait()
        await asyncio.sleep(0)
        [record] = caplog.records
    assert "the background task" in record.message
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
