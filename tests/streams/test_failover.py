"""A standby takes over under open stores, with or without the last events of the primary.

Nobody opens anything again.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

import storage
from storage import DatabaseError, DatabaseReplaced, EventId, ResyncNeeded, Store
from storage.database import Database
from storage.persist.commit.group_commit import BATCH_EVENTS_MAX
from storage.replication import Client, Server
from storage.streams.restore_detection import JUMP
from storage.streams.to_device import SQL_SEND
from tests.failover import ReplicatedPair, value
from tests.maintenance.rooms import SERVER, findings
from tests.pausing import pause
from tests.persist.writing import WRITES
from tests.postgres import SQL_WAITING
from tests.streams.lossy import ALICE, LOST, SELDOM, FailoverRoom, FeedRecorder, opened, timeline

pytestmark = [pytest.mark.timeout(120), pytest.mark.every_postgres]

LOST_WRITES = frozenset({*WRITES, SQL_SEND})


@pytest.fixture
async def pair() -> AsyncIterator[ReplicatedPair]:
    async with ReplicatedPair() as opened:
        yield opened


async def waiting(store: Store, since: str) -> "asyncio.Task[tuple[list[EventId], str]]":
    """A sync that has found nothing new, and waits."""
    task = asyncio.create_task(timeline(store, since, timeout_ms=60_000))
    while not store.notifier._waiting:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0)
    return task


async def test_what_is_new_after_a_lossy_failover_reaches_all(pair: ReplicatedPair) -> None:
    room = FailoverRoom()
    async with opened(pair, "a") as a, opened(pair, "b") as b:
        told_a, told_b = FeedRecorder(a), FeedRecorder(b)
        kept = await room.write(a, 20)
        await told_b.reached(kept)
        seen, early = await timeline(b, None)
        assert seen == kept
        await pair.caught_up()
        await pair.detach()
        before = room.stored
        lost = await room.write(a, LOST)
        await told_b.reached(lost)
        seen, late = await timeline(b, early)
        assert seen == lost
        for store in (a, b):  # remembered from here on
            assert len(await store.events(lost)) == LOST
        await pair.fail_over()
        room.back_to(before)
        new = []
        for _ in range(9):
            new += await room.write(a, 1)
        async with asyncio.timeout(60):
            await told_a.reached(new)
            await told_b.reached(new)
        for store in (a, b):
            with pytest.raises(ResyncNeeded, match="restored from"):
                await timeline(store, late)
            assert (await timeline(store, early))[0] == new
            assert (await timeline(store, None))[0] == kept + new
            assert await store.events(lost) == {}
            assert await findings(store) == []


async def test_who_waits_for_news_is_told_of_the_loss(pair: ReplicatedPair) -> None:
    room = FailoverRoom()
    async with opened(pair, "a") as a, opened(pair, "b") as b:
        kept = await room.write(a, 5)
        _, early = await timeline(a, None)
        await pair.caught_up()
        await pair.detach()
        before = room.stored
        await FeedRecorder(b).reached(await room.write(a, LOST))
        _, late = await timeline(b, early)
        waits_late = await waiting(b, late)
        await pair.fail_over()
        with pytest.raises(ResyncNeeded):
            await waits_late
        waits_early = await waiting(b, early)
        room.back_to(before)
        new = await room.write(a, 1)
        assert (await waits_early)[0] == new
        assert (await timeline(b, None))[0] == kept + new


async def committed_late(
    pair: ReplicatedPair, late: Store, room: FailoverRoom, soon: Store, other: FailoverRoom
) -> tuple[list[EventId], list[EventId]]:
    """Append an event that is lost, and one of another store that is kept.

    The lost one has the smaller position; the kept one was committed before it.
    """
    holds = await asyncpg.connect(pair.rooms(pair.primary))
    async with holds.transaction():
        await holds.execute(
            "SELECT FROM stream_positions WHERE instance_name = $1 "
            "AND stream_name = 'events' FOR UPDATE",
            late.streams.instance_name,
        )
        writing = asyncio.create_task(room.write(late, 1))
        while not await holds.fetchval(SQL_WAITING):
            await pause()
        kept = await other.write(soon, 1)
        await pair.caught_up()
        await pair.detach()
    await holds.close()
    return await writing, kept


async def test_an_event_is_lost_below_one_of_another_writer_that_is_kept(
    pair: ReplicatedPair,
) -> None:
    """Both stores write to the one stream, each to a room of its own."""
    room, other = FailoverRoom(), FailoverRoom(seed=8)
    async with opened(pair, "a", SELDOM) as a, opened(pair, "b", SELDOM) as b:
        await room.write(a, 5)
        told = FeedRecorder(a)
        await other.write(b, 5)
        early = (await timeline(a, None))[1]
        before = room.stored
        lost, kept = await committed_late(pair, a, room, b, other)
        at = {
            event_id: event.stream_ordering or 0
            for event_id, event in (await a.events(lost + kept)).items()
        }
        assert at[lost[0]] < at[kept[0]]
        seen, late = await timeline(b, early)
        assert set(seen) == {*lost, *kept}
        told.ids.clear()
        await pair.fail_over()
        room.back_to(before)
        new = await room.write(a, 2)
        for store in (a, b):
            with pytest.raises(ResyncNeeded, match="restored from"):
                await timeline(store, late)
            assert set((await timeline(store, early))[0]) == {*kept, *new}
            assert await store.events(lost) == {}
            assert await findings(store) == []
        _, since = await timeline(b, None)
        newest = await other.write(b, 1)
        assert await timeline(a, since) == (newest, (await timeline(a, None))[1])
        assert not set(lost) & set(told.ids)


async def test_nothing_is_written_before_the_database_is_entered_again(
    pair: ReplicatedPair,
) -> None:
    room = FailoverRoom()
    async with opened(
        pair, "a", replace(SELDOM, pool_acquire_timeout_ms=1_500, lock_timeout_ms=300)
    ) as a:
        await room.write(a, 5)
        await pair.caught_up()
        await pair.detach()
        before = room.stored
        lost = await room.write(a, LOST)
        await pair.fail_over()
        room.back_to(before)
        room.builder.message(ALICE, "refused")
        refused = room.builder.pdus[before:]
        holds = await asyncpg.connect(pair.rooms(pair.standby))
        async with holds.transaction():
            await holds.execute("LOCK TABLE stream_positions IN SHARE MODE")
            with pytest.raises(DatabaseError):  # the connection is found to be lost
                await a.append(refused)
            for write in (
                lambda: a.append(refused),
                lambda: a.to_device.send({ALICE: {"device": {"n": 1}}}),
            ):
                with pytest.raises(DatabaseReplaced):
                    await write()
            with pytest.raises(DatabaseReplaced):
                await timeline(a, None)
            assert await holds.fetchval("SELECT count(*) FROM events") == before
        await holds.close()
        assert [result.outcome for result in await a.append(refused)] == ["stored"]
        await a.to_device.send({ALICE: {"device": {"n": 2}}})
        assert [message.content for message in await a.to_device.inbox(ALICE, "device")] == [
            b'{"n":2}'
        ]
        assert await a.events(lost) == {}
        assert await findings(a) == []


class Silence:
    """An observer: once armed, the next write reaches the server, and its answer never comes."""

    def __init__(self, pair: ReplicatedPair) -> None:
        self._proxy = pair.proxies[0]
        self.is_armed = False
        self.passes = 0
        """So many writes are answered first."""

    def before(self, statement: str) -> None:
        if self.is_armed and statement in LOST_WRITES:
            self.passes -= 1
            if self.passes < 0:
                self._proxy.answers.clear()

    def after(self, statement: str, seconds: float) -> None:
        pass


@pytest.mark.parametrize("kind", ["events", "to_device"])
@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "replicated"])
async def test_a_write_without_an_answer_is_done_once(
    pair: ReplicatedPair, is_lost: bool, kind: str
) -> None:
    room, silence = FailoverRoom(), Silence(pair)
    config = replace(SELDOM, pool_size_max=1)
    async with storage.open(
        pair.dsn, server_name=SERVER, instance_name="a", config=config, observer=silence
    ) as a:
        told = FeedRecorder(a)
        for number in range(3):  # the statements are prepared
            await room.write(a, 1)
            await a.to_device.send({ALICE: {"device": {"n": number}}})
        before = room.stored
        await pair.caught_up()
        if is_lost:
            await pair.detach()
        silence.is_armed = True
        if kind == "events":
            room.builder.message(ALICE, "without an answer")
            writing: asyncio.Task[Any] = asyncio.create_task(a.append(room.builder.pdus[before:]))
        else:
            writing = asyncio.create_task(a.to_device.send({ALICE: {"device": {"n": 3}}}))
        counted = "SELECT (SELECT count(*) FROM events) + (SELECT count(*) FROM to_device)"
        while await value(pair.rooms(pair.primary), counted) != before + 4:
            await pause()
        if not is_lost:
            await pair.caught_up()
        await pair.fail_over()
        silence.is_armed = False
        pair.proxies[0].cut()
        pair.proxies[0].answers.set()
        result = await writing
        at = "SELECT stream_id FROM to_device ORDER BY stream_id DESC LIMIT 1"
        if kind == "events":
            assert result[0].outcome == "stored"
            result, at = result[0].stream_ordering, "SELECT max(stream_ordering) FROM events"
        assert result == await value(pair.rooms(pair.standby), at)
        assert (result > JUMP) is is_lost
        messages = [message.content for message in await a.to_device.inbox(ALICE, "device")]
        assert messages == [b'{"n":%d}' % number for number in range(3 if kind == "events" else 4)]
        assert told.ids == [event.event_id for event in room.builder.events]
        assert await findings(a) == []


async def test_the_beginning_of_a_batch_that_is_lost_is_not_reported_as_stored(
    pair: ReplicatedPair,
) -> None:
    """A large batch takes several writes.

    The first returned here, and was then lost with the primary.
    """
    room, silence = FailoverRoom(), Silence(pair)
    config = replace(SELDOM, pool_size_max=1)
    async with storage.open(
        pair.dsn, server_name=SERVER, instance_name="a", config=config, observer=silence
    ) as a:
        for _ in range(3):
            await room.write(a, 1)
        before = room.stored
        await pair.caught_up()
        await pair.detach()
        for number in range(3 * BATCH_EVENTS_MAX):
            room.builder.message(ALICE, str(number))
        silence.is_armed, silence.passes = True, 1
        appending = asyncio.create_task(a.append(room.builder.pdus[before:]))
        while (
            await value(pair.rooms(pair.primary), "SELECT count(*) FROM events")
            < before + 2 * BATCH_EVENTS_MAX
        ):
            await pause()
        await pair.fail_over()
        silence.is_armed = False
        pair.proxies[0].cut()
        pair.proxies[0].answers.set()
        with pytest.raises(DatabaseReplaced, match="repeat"):
            await appending
        results = await a.append(room.builder.pdus[before:])
        assert {result.outcome for result in results} == {"stored"}
        assert len(await a.events([event.event_id for event in room.builder.events])) == len(
            room.builder.events
        )
        assert await findings(a) == []


@pytest.mark.parametrize("is_split", [False, True], ids=["primary gone", "primary lives on"])
async def test_a_store_behind_replication_hears_of_it(pair: ReplicatedPair, is_split: bool) -> None:
    """The worker polls the tables once an hour.

    It must learn of a restore from a leap of the positions.
    """
    room, other = FailoverRoom(), await pair.address()
    async with (
        opened(pair, "a", SELDOM) as a,
        opened(pair, "b", SELDOM, other) as b,
        await Server(a).serve() as server,
        Client(b, "127.0.0.1", server.port) as client,
    ):
        told = FeedRecorder(b)
        await client.connected()
        kept = await room.write(a, 5)
        await told.reached(kept)
        _, early = await timeline(b, None)
        await pair.caught_up()
        await pair.detach()
        before = room.stored
        await told.reached(await room.write(a, LOST))
        _, late = await timeline(b, early)
        if is_split:
            await pair.promote()
            pair.point_to_standby()
            pair.proxies[0].cut()
        else:
            await pair.fail_over()
        room.back_to(before)
        new = [event_id for _ in range(9) for event_id in await room.write(a, 1)]
        async with asyncio.timeout(60):
            await told.reached(new)
        assert told.ids[-9:] == new
        with pytest.raises(ResyncNeeded):
            await timeline(b, late)
        assert (await timeline(b, early))[0] == new
        assert (await timeline(b, None))[0] == kept + new


async def test_a_failover_that_loses_nothing_is_a_pause(pair: ReplicatedPair) -> None:
    """Events and messages are written throughout, and each is there once.

    No client has to begin again.
    """
    room, count = FailoverRoom(), 150
    async with opened(pair, "a") as a, opened(pair, "b") as b, await Database.open(pair.dsn) as job:
        told = FeedRecorder(b)
        kept = await room.write(a, 5)
        seen, since = await timeline(b, None)
        events = [room.builder.message(ALICE, str(number)) for number in range(count)]

        async def write() -> None:
            for number, event in enumerate(events):
                while True:
                    try:
                        [result] = await a.append([event.pdu])
                    except DatabaseError:
                        continue
                    assert result.outcome in {"stored", "duplicate"}
                    break
                if number == count // 3:
                    begun.set()

        begun = asyncio.Event()
        writing = asyncio.create_task(write())
        await begun.wait()
        await pair.stop_primary()
        pair.point_to_standby()
        for _ in range(3):
            with pytest.raises(DatabaseError):  # a standby is no place to go on
                await a.event(kept[0], redact=False)
        await pair.promote()
        await writing
        for _ in range(2):  # numbers that a job has read may be others' now
            with pytest.raises(DatabaseReplaced, match="begin again"):
                async with job.connection():
                    await pause()
        ids = [event.event_id for event in events]
        async with asyncio.timeout(60):
            await told.reached(ids)
        assert told.ids == kept + ids
        new, _ = await timeline(b, since)
        assert seen + new == kept + ids
        for store in (a, b):
            assert await findings(store) == []


async def test_defined_streams_go_on_after_a_lossy_failover(pair: ReplicatedPair) -> None:
    """One of them is defined by the lost writes: the stores define it again."""
    room = FailoverRoom()
    async with opened(pair, "a") as a, opened(pair, "b") as b:
        await room.write(a, 1)
        early = a.define_stream("early")
        kept = await early.publish("key", "kept")
        _, before = await timeline(a, None)
        await pair.caught_up()
        await pair.detach()
        late = await a.define_stream("late")
        lost = await early.publish("key", "lost")
        await late.publish("key", "lost")
        _, after = await timeline(a, before)
        b.define_stream("late")
        await b.stream("late")
        await pair.fail_over()
        async with asyncio.timeout(30):
            for store in (a, b):
                await store.stream("late").publish("key", f"by {store.instance_name}")
            new = await early.publish("key", "new")
            assert new > lost + JUMP // 2
            with pytest.raises(ResyncNeeded, match="restored from"):
                await timeline(a, after)
            _, token = await timeline(a, before)
        assert [fact.value for fact in await early.rows(kept)] == ["new"]
        facts = await b.stream("late").rows()
        assert [fact.value for fact in facts] == ["by a", "by b"]
        assert a.positions_of(token)["early"].covers("a", new)
        assert await findings(a) == []
