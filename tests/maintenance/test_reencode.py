"""The job that encodes stored events again: no byte is lost, whatever ends it or runs beside it."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import storage
from storage import Store
from storage.codec import Dictionary, train
from storage.database import Database
from storage.database.background import JobRow, register_again, run_jobs
from storage.database.migrate import HEAD_REVISION
from storage.errors import DatabaseUnavailable
from storage.maintenance.censor import censor
from storage.maintenance.known_jobs import known_jobs
from storage.maintenance.reencode import JOB_NAME, store_dictionary
from storage.testing import RoomBuilder, build_room
from tests.cli.running import ROOT
from tests.maintenance.rooms import LIVELY, SERVER, findings
from tests.persist.tables import logical_tables
from tests.persist.test_append import FailAt
from tests.stored_bytes import bytes_of, form, forms_of, store_plainly

PLAIN = ord("{")


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    config = storage.Config(follow_ms=3_600_000)
    async with storage.open(dsn, server_name=SERVER, config=config) as opened:
        yield opened


@pytest.fixture
async def room(store: Store) -> RoomBuilder:
    """A room of which no event is encoded, and the job that is registered."""
    made = build_room(LIVELY, 150, seed=8)
    await store.append(made.pdus)
    async with store.database.connection() as conn:
        await store_plainly(store.database)
        await register_again(conn, JOB_NAME, HEAD_REVISION)
        assert {form(one) for one in (await forms_of(conn._driver)).values()} == {PLAIN}
    return made


async def run_the_job(database: Database, *, rows: int = 40) -> list[JobRow]:
    async with database.connection() as conn:
        await conn.execute("UPDATE background_jobs SET batch_rows = $1::int", rows)
    # a clock that stands still would let batches grow
    ticks = iter(range(10**9))
    return [
        row
        async for row in run_jobs(database, known_jobs(), pause=0, clock=lambda: next(ticks) * 0.15)
    ]


async def forms(store: Store) -> dict[str, Any]:
    async with store.database.connection() as conn:
        return await forms_of(conn._driver)


async def raw_bytes(store: Store) -> dict[str, bytes]:
    async with store.database.connection() as conn:
        return await bytes_of(conn._driver)


async def plain_events(store: Store) -> list[str]:
    return [one for one, stored in (await forms(store)).items() if form(stored) == PLAIN]


async def test_all_events_are_encoded_and_say_the_same(store: Store, room: RoomBuilder) -> None:
    before, tables = await raw_bytes(store), await logical_tables(store.database)
    done = await run_the_job(store.database)
    assert len(done) == 5
    assert (done[-1].rows_done, done[-1].rows_expected) == (len(before), len(before))
    assert await plain_events(store) == []
    assert await raw_bytes(store) == before
    assert await logical_tables(store.database) == tables
    assert await findings(store) == []


async def test_a_second_run_writes_nothing(store: Store, room: RoomBuilder) -> None:
    versions = "SELECT xmin::text FROM events ORDER BY event_nid"
    await run_the_job(store.database)
    async with store.database.connection() as conn:
        before = await conn.fetchvals(versions)
        await register_again(conn, JOB_NAME, HEAD_REVISION)
        assert (await run_the_job(store.database))[-1].rows_done == len(room.events)
        assert await conn.fetchvals(versions) == before


async def test_a_job_that_is_not_done_goes_on(store: Store, room: RoomBuilder) -> None:
    async for _ in run_jobs(store.database, known_jobs(), pause=0):
        break
    async with store.database.connection() as conn:
        place = await conn.fetchval("SELECT place FROM background_jobs")
        await register_again(conn, JOB_NAME, HEAD_REVISION)
        assert await conn.fetchval("SELECT place FROM background_jobs") == place > 0
    assert (await run_the_job(store.database))[-1].rows_done == len(room.events)


async def test_a_failure_at_any_statement_loses_nothing(dsn: str, room: RoomBuilder) -> None:
    observer = FailAt()
    one = storage.Config(pool_size_max=1)
    async with await Database.open(dsn, config=one, observer=observer) as database:
        pdus = {event.event_id: event.pdu for event in room.events}
        for count in range(200):
            observer.seen, observer.count, observer.failed = 0, count, False
            try:
                await run_the_job(database)
            except DatabaseUnavailable:
                observer.count = -1
                async with database.connection() as conn:
                    assert await bytes_of(conn._driver) == pdus, count
            else:
                break
        assert count > 12
        async with database.connection() as conn:
            assert await bytes_of(conn._driver) == pdus
            assert PLAIN not in map(form, (await forms_of(conn._driver)).values())


async def test_a_killed_process_loses_nothing(dsn: str, store: Store, room: RoomBuilder) -> None:
    """Killed within a batch, at its end, and within the next one; then it goes on."""
    before = await raw_bytes(store)
    async with store.database.connection() as conn:
        await conn.execute("UPDATE background_jobs SET batch_rows = 40")
    left = [len(before)]
    for statements in (9, 12, 17, 1_000):
        process = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "tests.maintenance.reencode_process", dsn, str(statements)],
            cwd=ROOT,
            check=False,
        )
        assert process.returncode == (0 if statements == 1_000 else -signal.SIGKILL)
        assert await raw_bytes(store) == before
        left.append(len(await plain_events(store)))
    assert left[0] == left[1] > left[-2] > left[-1] == 0, left
    assert await findings(store) == []


async def test_a_locked_row_is_left_and_taken_by_the_next_run(
    store: Store, room: RoomBuilder
) -> None:
    locked = room.events[20].event_id
    async with store.database.transaction() as other:
        await other.execute(
            "SELECT FROM events WHERE event_id = $1::text FOR NO KEY UPDATE", locked
        )
        await run_the_job(store.database)
        assert await plain_events(store) == [locked]
    async with store.database.connection() as conn:
        await register_again(conn, JOB_NAME, HEAD_REVISION)
    await run_the_job(store.database)
    assert await plain_events(store) == []


async def test_what_others_change_meanwhile_stays_changed(store: Store) -> None:
    """Events are sent, redacted and censored, and the job runs beside it all the time."""
    room = RoomBuilder("11")
    user = f"@user1:{SERVER}"
    room.start(user)
    said = [room.message(user, f"secret {number}") for number in range(60)]
    await store.append(room.pdus)
    await store_plainly(store.database)

    async def change() -> None:
        for event in said:
            await store.append([room.redact(user, event).pdu, room.message(user).pdu])
            await censor(store.database, older_than_ms=0)

    async def encode() -> None:
        while not changing.done():
            async with store.database.connection() as conn:
                await register_again(conn, JOB_NAME, HEAD_REVISION)
            await run_the_job(store.database, rows=7)

    changing = asyncio.ensure_future(change())
    await asyncio.gather(changing, encode())
    after = await raw_bytes(store)
    assert not any(b"secret" in raw for raw in after.values())
    sent = {one.event_id: one.pdu for one in room.events if one not in said}
    assert sent.items() <= after.items()
    assert await findings(store) == []


async def test_a_new_dictionary(store: Store, room: RoomBuilder) -> None:
    """It is used where an event becomes a tenth shorter."""
    await run_the_job(store.database)
    before, old = await raw_bytes(store), await forms(store)
    dictionary = Dictionary(
        train(((raw, room.room_id) for raw in before.values()), are_private=False)
    )
    await store_dictionary(store.database, dictionary, len(before))
    async with store.database.connection() as conn:
        await register_again(conn, JOB_NAME, HEAD_REVISION)
    await run_the_job(store.database)
    new = await forms(store)
    changed = [one for one in new if new[one] != old[one]]
    assert len(changed) > 20
    assert {new[one][1:4] for one in changed} == {dictionary.key}
    assert all(len(new[one]) <= 0.9 * len(old[one]) for one in changed)
    assert await raw_bytes(store) == before


async def test_a_damaged_event_is_left_alone(
    store: Store, room: RoomBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = room.events[30].event_id
    async with store.database.connection() as conn:
        await conn.execute("UPDATE events SET json = 'x' WHERE event_id = $1::text", damaged)
    await run_the_job(store.database)
    assert await plain_events(store) == []
    assert (await forms(store))[damaged] == b"x"
    assert damaged in caplog.text
