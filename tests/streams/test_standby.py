"""Reads on a real standby: made by pg_basebackup, paused, cancelled, restarted, and promoted.

`STORAGE_EXAMPLES` says how many random questions, `STORAGE_SEED` which.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

import storage
from storage import InputError, ReadOnly, ReplicaBehind, ResyncNeeded, Store
from storage.database import Connection
from storage.maintenance.cold_archive import archive_events, return_events
from storage.streams import standby as standby_watch
from storage.streams.reads import BEHIND, CANCELLED, RESTING, STANDBY
from storage.testing import build_room
from tests.failover import ReplicatedPair, ask, value
from tests.maintenance.rooms import LIVELY, SERVER
from tests.streams.lossy import ALICE, LOST, FailoverRoom, FeedRecorder, timeline
from tests.streams.standby_pair import (
    ALONE,
    CONFIG,
    PATIENT,
    answered_by_standby,
    crashed,
    on_primary,
    on_standby,
    outcomes,
    paused,
    with_standby,
)
from tests.streams.standby_questions import answer, moment, of_anything, with_the_token

EXAMPLES: Final = int(os.environ.get("STORAGE_EXAMPLES", "400"))
SEED: Final = int(os.environ.get("STORAGE_SEED", "1"))

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.every_postgres,
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[ReplicatedPair]:
    """One pair for all tests that leave it as it is; each test has rooms of its own."""
    async with ReplicatedPair() as opened, on_primary(opened, "main"):
        await opened.caught_up()
        yield opened


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a standby that answers late; tests/streams/test_standby_hangs.py is about others."""
    monkeypatch.setattr(standby_watch, "ANSWER_SECONDS", 60.0)


async def test_a_process_reads_what_it_wrote_from_the_standby(pair: ReplicatedPair) -> None:
    room = FailoverRoom(seed=101)
    async with with_standby(pair, "a", PATIENT) as store:
        for _ in range(20):
            [written] = (await room.write(store, 1))[-1:]
            assert (await store.event(written)) is not None
            assert written in (await timeline(store, None))[0]
        found = outcomes(store)
        assert found.keys() == {STANDBY}
        assert found[STANDBY] >= 40


async def test_a_standby_reads_archived_events(pair: ReplicatedPair, tmp_path: Path) -> None:
    room = FailoverRoom(seed=120)
    async with on_primary(pair, "a") as store:
        written = await room.write(store, 30)
        done = await archive_events(
            store.database,
            older_than_ms=-1,
            url=str(tmp_path),
            room_ids=[room.builder.room_id],
            grace_s=0,
        )
        assert done.events >= 30
        await pair.caught_up()
        async with on_standby(pair) as reader:
            found = await reader.events(written)
            assert {one: found[one].raw for one in written} == {
                event.event_id: event.pdu
                for event in room.builder.events
                if event.event_id in written
            }
        await return_events(store.database, grace_s=0)


async def test_a_token_of_another_process_is_waited_for(pair: ReplicatedPair) -> None:
    room = FailoverRoom(seed=102)
    async with on_primary(pair, "a") as a, with_standby(pair, "b", PATIENT) as b:
        await room.write(a, 1)
        early = (await timeline(a, None))[1]
        await timeline(b, early)
        async with paused(pair):
            written = await room.write(a, 3)
            token = (await timeline(a, early))[1]
            waiting = asyncio.create_task(timeline(b, token))
            page = asyncio.create_task(b.messages(room.builder.room_id, ALICE, from_=token))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            assert not page.done()
        assert (await waiting)[0] == []
        assert [event.event_id for event in (await page).chunk][:3] == written[::-1]
        assert outcomes(b).keys() == {STANDBY}


async def test_the_primary_answers_for_a_standby_that_is_behind(pair: ReplicatedPair) -> None:
    room = FailoverRoom(seed=103)
    async with on_primary(pair, "a") as a, with_standby(pair, "b", ALONE) as b:
        await room.write(a, 1)
        early = await answered_by_standby(pair, b)
        async with paused(pair):
            written = await room.write(a, 3)
            token = (await timeline(a, early))[1]
            assert await b.event(written[0]) is None  # nothing has told this process of it
            assert outcomes(b) == {STANDBY: 1}
            assert (await timeline(b, token))[0] == []
            assert outcomes(b)[BEHIND] >= 1
            # and what it has seen stays
            assert await b.event(written[0]) is not None
            assert (await timeline(b, early))[0] == written
            assert not outcomes(b)[STANDBY]


async def test_what_this_process_was_told_of_is_in_its_answers(pair: ReplicatedPair) -> None:
    room = FailoverRoom(seed=109)
    async with on_primary(pair, "a") as a, with_standby(pair, "b") as b:
        await timeline(b, None)
        told = FeedRecorder(b)
        async with paused(pair):
            written = await room.write(a, 1)
            await told.reached(written)
            assert await b.event(written[0]) is not None


async def test_a_resting_standby_is_tried_again_after_an_input_error(
    pair: ReplicatedPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its DSN cannot be used for a moment, as while a file of TLS is replaced."""
    config = replace(CONFIG, prepare_ahead=False)  # that would open a session beside
    async with with_standby(pair, "b", config) as b, asyncio.timeout(60):
        standby = b.reads.standby
        assert standby is not None
        async with standby.database.connection() as conn, standby.database.connection() as other:
            monkeypatch.setenv("PGSSLMODE", "of yesterday")
            standby.database.end_sessions(besides=conn)
            standby.database.end_sessions(besides=other)
        while not standby.database.measures.database_errors["InputError"]:
            standby.rest("for a test")  # again, if its last state was recent enough
            await asyncio.sleep(0.01)
        monkeypatch.delenv("PGSSLMODE")
        while standby.is_resting:  # noqa: ASYNC110  # it has no signal for the end
            await asyncio.sleep(0.01)
    assert "the standby is back" in caplog.text


async def test_a_lagging_standby_is_left_alone_until_it_has_caught_up(
    pair: ReplicatedPair, caplog: pytest.LogCaptureFixture
) -> None:
    room = FailoverRoom(seed=104)
    async with with_standby(pair, "b", ALONE) as b:
        await room.write(b, 1)
        await answered_by_standby(pair, b)
        async with paused(pair):
            written = await room.write(b, 1)
            for _ in range(5):
                assert await b.event(written[0]) is not None
            assert outcomes(b) == {BEHIND: 1, RESTING: 4}
        async with asyncio.timeout(60):
            while not outcomes(b)[STANDBY]:
                await b.event(written[0])
                await asyncio.sleep(0.01)
    assert "reads go to the primary" in caplog.text
    assert "the standby is back" in caplog.text


async def test_a_store_on_a_standby_alone(pair: ReplicatedPair) -> None:
    room = FailoverRoom(seed=105)
    impatient = storage.Config(follow_ms=50, replica_wait_ms=50)
    # it may have the name of a writer
    async with on_primary(pair, "a") as a, on_standby(pair, "a", impatient) as reader:
        await room.write(a, 1)
        written = await room.write(a, 3)
        token = (await timeline(a, None))[1]
        await pair.caught_up()
        assert (await timeline(reader, token))[0] == []
        assert set(written) <= set((await timeline(reader, None))[0])
        async with paused(pair):
            more = await room.write(a, 1)
            later = (await timeline(a, token))[1]
            assert (await timeline(reader, token))[0] == []
            with pytest.raises(ReplicaBehind, match="50 ms"):
                await timeline(reader, later)
            page = (await a.context(more[0], ALICE)).end
            with pytest.raises(ReplicaBehind):
                await reader.messages(room.builder.room_id, ALICE, from_=page, direction="b")
        assert (await timeline(reader, token))[0] == more
        waiting = asyncio.create_task(timeline(reader, later, timeout_ms=60_000))
        last = await room.write(a, 1)
        assert (await waiting)[0] == last
        events = reader.streams["events"]
        assert events.linear() == min(events.positions().values()) > 0
        assert outcomes(reader)[BEHIND] == 2


WRITES: dict[str, Callable[[Store, FailoverRoom], Awaitable[object]]] = {
    "append": lambda store, room: store.append(room.builder.pdus),
    "send": lambda store, room: store.send(room.builder.room_id, ALICE, "m.room.message", {}),
    "template": lambda store, room: store.template(room.builder.room_id, ALICE, "m.a", {}),
    "create_room": lambda store, _: store.create_room(ALICE),
    "readmit": lambda store, room: store.readmit(room.builder.events[-1].event_id),
    "erase_user": lambda store, _: store.erase_user(ALICE),
    "restore_user": lambda store, _: store.restore_user(ALICE),
    "forget": lambda store, room: store.forget(ALICE, room.builder.room_id),
    "gap_failed": lambda store, room: store.gap_failed(room.builder.room_id, ["$a"], "gone"),
    "server_up": lambda store, _: store.server_up("s2.test"),
    "sliding_sync": lambda store, _: store.sliding_sync(
        ALICE, storage.SlidingSyncRequest(), device_id="D"
    ),
    "publish": lambda store, room: store.define_stream("typing").publish(room.builder.room_id, 1),
    "account_data": lambda store, _: store.account_data.set(ALICE, "m.a", {}),
    "receipts": lambda store, room: store.receipts.set(
        room.builder.room_id, "m.read", ALICE, room.builder.events[-1].event_id, {}
    ),
    "to_device.send": lambda store, _: store.to_device.send({ALICE: {"D": {"a": 1}}}),
    "to_device.delete": lambda store, _: store.to_device.delete(ALICE, "D", 5),
    "cursors": lambda store, _: store.cursors.set("sender", 1),
}


async def test_every_write_of_a_read_only_store_is_refused(pair: ReplicatedPair) -> None:
    room = FailoverRoom(seed=106)
    async with on_primary(pair, "a") as a:
        await room.write(a, 1)
        await pair.caught_up()
        # a primary refuses as well: the session may not write
        for dsn in (pair.rooms(pair.standby), pair.rooms(pair.primary)):
            async with storage.open(dsn, read_only=True, config=CONFIG) as reader:
                before = await a.rooms([room.builder.room_id])
                for name, write in WRITES.items():
                    with pytest.raises(ReadOnly):
                        await write(reader, room)
                        pytest.fail(name)
                assert await reader.rooms([room.builder.room_id]) == before
                assert await reader.cursors.get("sender") == 0
                assert (await reader.outbox(0)).upto > 0


async def test_defined_streams_are_followed_without_entering_them(pair: ReplicatedPair) -> None:
    async with on_primary(pair, "a") as a, on_standby(pair) as reader:
        typing, read = a.define_stream("typing"), reader.define_stream("typing")
        since = (await timeline(a, None))[1]
        at = await typing.publish("!a:s1.test", {"user_ids": [ALICE]}, wakes=[ALICE])
        token = (await timeline(a, since))[1]
        assert (await timeline(reader, token))[0] == []
        assert [fact.stream_id for fact in await read.rows(at - 1)] == [at]
        waiting = asyncio.create_task(timeline(reader, token, timeout_ms=60_000))
        await typing.publish("!a:s1.test", {"user_ids": []}, wakes=[ALICE])
        assert reader.positions_of((await waiting)[1])["typing"].furthest() > at


async def cancelled_once(pair: ReplicatedPair, store: Store, *, is_idle: bool) -> tuple[int, int]:
    """Read while the standby replays a lock of the table: the answer, and how often it was begun.

    Postgres cancels a running statement, and ends a session that is idle in its transaction.
    """
    begun, locking = 0, asyncio.Event()

    async def lock() -> None:
        await locking.wait()
        await ask(
            pair.rooms(pair.primary), "BEGIN; LOCK TABLE cursors IN ACCESS EXCLUSIVE MODE; COMMIT"
        )
        await pair.caught_up()

    async def read(conn: Connection) -> int:
        nonlocal begun
        begun += 1
        await conn.fetchval("SELECT count(*) FROM cursors")
        if begun == 1:
            locking.set()
            if not is_idle:
                await conn.fetchval("SELECT pg_sleep(60)")
            await running
        return int(await conn.fetchval("SELECT count(*) FROM cursors"))

    running = asyncio.create_task(lock())
    found = await store.reads.run(read, snapshot=True)
    await running
    return found, begun


@pytest.mark.parametrize("is_idle", [False, True])
async def test_a_read_that_a_recovery_conflict_cancels_is_repeated(
    pair: ReplicatedPair, *, is_idle: bool
) -> None:
    await ask(
        pair.standby.dsn,
        "ALTER SYSTEM SET max_standby_streaming_delay = 0",
        "SELECT pg_reload_conf()",
    )
    async with with_standby(pair, "b") as store, on_standby(pair) as reader:
        for one, elsewhere in ((store, {CANCELLED: 1}), (reader, {CANCELLED: 1, STANDBY: 1})):
            outcomes(one)
            assert await cancelled_once(pair, one, is_idle=is_idle) == (0, 2)
            assert outcomes(one) == elsewhere


async def test_a_standby_that_is_gone_and_comes_back(pair: ReplicatedPair) -> None:
    room = FailoverRoom(seed=107)
    async with with_standby(pair, "b") as store:
        written = await room.write(store, 1)
        assert await store.event(written[0]) is not None
        await asyncio.to_thread(pair.standby.stop)
        outcomes(store)
        for _ in range(3):
            assert await store.event(written[0]) is not None
        found = outcomes(store)
        assert found.total() == 3
        assert not found[STANDBY]
        async with with_standby(pair, "c") as other:  # opened without its standby
            assert await other.event(written[0]) is not None
            assert outcomes(other) == {RESTING: 1}
            await asyncio.to_thread(pair.standby.start)
            async with asyncio.timeout(30):
                for one in (store, other):
                    while not outcomes(one)[STANDBY]:
                        assert await one.event(written[0]) is not None
                        await asyncio.sleep(0.01)


async def test_a_standby_that_crashes_takes_nobody_back(pair: ReplicatedPair) -> None:
    """It comes back at a state from before an event that a client has read there."""
    room = FailoverRoom(seed=111)
    async with on_primary(pair, "a") as a, with_standby(pair, "b", ALONE) as b:
        await room.write(a, 1)
        await answered_by_standby(pair, b)
        before = await value(pair.primary.dsn, "SELECT pg_current_wal_flush_lsn()::text")
        written = await room.write(a, 1)
        await pair.caught_up()
        assert await b.event(written[0]) is not None
        assert outcomes(b).keys() == {STANDBY}
        async with crashed(pair, replays_to=before):
            assert await b.event(written[0]) is not None
            assert not outcomes(b)[STANDBY]


async def test_a_crash_takes_nobody_back_without_a_primary(pair: ReplicatedPair) -> None:
    """The standby was polled before the event: it is where that poll saw it, and not where it was.

    A token is no help, because the client has none.
    """
    room = FailoverRoom(seed=112)
    async with on_primary(pair, "a") as a, on_standby(pair, "reader", ALONE) as reader:
        await room.write(a, 1)
        await pair.caught_up()
        await timeline(reader, None)
        before = await value(pair.primary.dsn, "SELECT pg_current_wal_flush_lsn()::text")
        written = await room.write(a, 1)
        await pair.caught_up()
        assert await reader.event(written[0]) is not None
        async with crashed(pair, replays_to=before):
            with pytest.raises(ReplicaBehind):
                await reader.event(written[0])
        assert await reader.event(written[0]) is not None


async def test_what_is_opened_in_vain(pair: ReplicatedPair, dsn: str) -> None:
    standby = pair.rooms(pair.standby)
    async with storage.open(dsn, server_name=SERVER):
        pass
    with pytest.raises(InputError, match="another database"):
        async with with_standby(pair, "b", dsn=dsn):
            pass
    with pytest.raises(InputError, match="synchronous_commit"):
        async with with_standby(pair, "b", storage.Config(synchronous_commit="off")):
            pass
    for options in ({"migrate": True}, {"replica_dsn": standby}):
        with pytest.raises(InputError, match="read_only"):
            async with storage.open(standby, read_only=True, **options):
                pass
    with pytest.raises(InputError, match="read_only"):
        async with storage.open(read_only=True):
            pass
    with pytest.raises(storage.WrongServerName):
        async with storage.open(standby, server_name="s9.test", read_only=True):
            pass


async def test_a_primary_in_place_of_the_standby_is_not_read(pair: ReplicatedPair) -> None:
    async with with_standby(pair, "b", replica_dsn=pair.rooms(pair.primary)) as store:
        await store.rooms([])
        assert outcomes(store) == {RESTING: 1}


async def test_a_standby_that_knows_of_another_restore_is_not_read(pair: ReplicatedPair) -> None:
    gap = "INSERT INTO lost_positions VALUES ('events', 1::bigint << 40, (1::bigint << 40) + 1)"
    dsn, room = pair.rooms(pair.primary), FailoverRoom(seed=110)
    async with with_standby(pair, "b", ALONE) as b:
        await room.write(b, 1)
        await answered_by_standby(pair, b)
        await ask(dsn, gap)
        await pair.caught_up()
        await room.write(b, 1)
        await timeline(b, None)
        await ask(dsn, "DELETE FROM lost_positions")
        assert not outcomes(b)[STANDBY]


async def test_random_questions_have_the_answers_of_the_primary(pair: ReplicatedPair) -> None:
    """Both are asked while the standby may still be replaying what the tokens cover."""
    rng = random.Random(SEED)
    room = build_room(LIVELY, 60 + EXAMPLES // 10, seed=SEED)
    stored, asked, earlier = 0, 0, list[str]()
    async with (
        on_primary(pair, "a", ALONE) as primary,
        on_standby(pair, config=PATIENT) as reader,
        with_standby(pair, "b", PATIENT) as store,
    ):
        while asked < EXAMPLES:
            count = 40 if not stored else rng.randint(1, 4)
            await primary.append([one.pdu for one in room.events[stored : stored + count]])
            stored = min(stored + count, len(room.events))
            at = await moment(primary, room, stored, earlier)
            earlier = [*at.earlier[-20:]]
            for number in range(40):
                question = (of_anything if number else with_the_token)(rng, at)
                for one in (reader, store):
                    if not number:  # each meets the token itself first
                        question = with_the_token(rng, at)
                    assert await answer(one, question) == await answer(primary, question)
                    asked += 1
        for one in (reader, store):
            found = outcomes(one)
            assert found[STANDBY] > 0.98 * found.total()
            assert len(one.measures.replica_waits) > 0


async def test_promotion_below_open_stores() -> None:
    """The standby takes over without the last events: nothing of two histories is mixed."""
    room = FailoverRoom(seed=108)
    async with (
        ReplicatedPair() as pair,
        with_standby(pair, "a", dsn=pair.dsn) as a,
        on_standby(pair) as reader,
        on_standby(pair, config=ALONE) as late_reader,
    ):
        kept = await room.write(a, 20)
        seen, early = await timeline(a, None)
        assert seen == kept
        assert (await timeline(reader, early))[0] == []
        await pair.caught_up()
        await pair.detach()
        await pair.promote()
        async with asyncio.timeout(60):
            while not outcomes(a)[RESTING]:  # noticed, though each read is covered
                assert await a.event(kept[0]) is not None
                await asyncio.sleep(0.01)
        before = room.stored
        lost = await room.write(a, LOST)  # the primary is still there
        seen, late = await timeline(a, early)
        assert seen == lost
        told = FeedRecorder(a)
        assert not outcomes(a)[STANDBY]
        await pair.stop_primary()
        pair.point_to_standby()
        room.back_to(before)
        new = await room.write(a, 3)
        await told.reached(new)
        # this one has not read the lost positions before its first call
        with pytest.raises(ResyncNeeded, match="restored from"):
            await late_reader.membership(room.builder.room_id, ALICE, at=late)
        for store in (a, reader, late_reader):
            with pytest.raises(ResyncNeeded, match="restored from"):
                await timeline(store, late)
            assert (await timeline(store, early))[0] == new
            assert (await timeline(store, None))[0] == kept + new
        assert not outcomes(a)[STANDBY]  # the server is a primary now
        with pytest.raises(ReadOnly):
            await reader.cursors.set("sender", 1)
