"""Plans that are in flight while a batch of a purge commits: nothing is lost.

They are written as they are, or refused if they depend on purged rows.
"""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest

import storage
from storage import AppendResult, Config, Store
from storage.database import Database
from storage.database.embedded import EmbeddedPostgres
from storage.database.migrate import migrate
from storage.errors import PurgeRefused, UnknownEvent
from storage.ids import EventId
from storage.maintenance.purge import history, purge_history
from storage.persist.model.caches import WriterCaches
from storage.streams.position_poller import follow_once
from storage.testing import BuiltEvent, RoomBuilder, build_room
from storage.testing.world import ODD_SOME
from tests.maintenance.purging import ALICE, BOB, Stop, chat, value
from tests.maintenance.rooms import LIVELY, SERVER, findings
from tests.pausing import pause
from tests.small_limits import purge_batches, purges_in_batches

ROOMS = int(os.environ.get("STORAGE_ROOMS", "6"))
ALONE = Config(purge_pause_ms=0, follow_ms=3_600_000)
small_batches = purges_in_batches(100)
TIMELINE = "SELECT count(*) FROM events WHERE NOT outlier"
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
    "AND wait_event = 'advisory' AND datname = current_database()"
)


@pytest.fixture
def config() -> Config:
    return ALONE


class Forgets:
    """Counts how often the caches of a writer are dropped whole."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        whole = WriterCaches.forget

        def forget(caches: WriterCaches) -> None:
            self.count += 1
            whole(caches)

        monkeypatch.setattr(WriterCaches, "forget", forget)


class Batch(Stop):
    """The first batch of a purge, stopped before its commit: its deletions commit once released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, history, "publish_removed")

    async def beside(
        self, dsn: str, purging: Awaitable[Any], append: Awaitable[list[AppendResult]]
    ) -> list[AppendResult]:
        """The answers to an append that was planned before the commit and is written after it."""
        admin = await asyncpg.connect(dsn)
        try:
            async with self.during(purging):
                answers = asyncio.ensure_future(append)
                while not (answers.done() or await admin.fetchval(WAITING)):
                    await pause()
                assert not answers.done(), "it waits for the room"
        finally:
            await admin.close()
        return await answers


class HeldBackPurge(Stop):
    """The first batch of a purge, stopped where its rows have gone and the room is not held yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, history, "lock_room_keeping_plans")

    async def beside(
        self, purging: Awaitable[Any], append: Awaitable[list[AppendResult]], *, wait: bool = True
    ) -> list[AppendResult]:
        """Return the results of an append written meanwhile.

        Without ``wait`` it is only begun, as it needs the purge's locks.
        """
        async with self.during(purging):
            answers = asyncio.ensure_future(append)
            await asyncio.wait([answers], timeout=None if wait else 0.1)
            assert answers.done() is wait
        return await answers


def purging(store: Store, room: RoomBuilder, point: BuiltEvent) -> Awaitable[Any]:
    return purge_history(
        store.database, room.room_id, server_name=SERVER, before_event_id=point.event_id, local=True
    )


def given(*events: BuiltEvent) -> dict[EventId, list[EventId]]:
    return {event.event_id: sorted(event.state_before.values()) for event in events}


async def test_what_stands_on_the_ends_of_the_room_is_written_as_it_was_planned(
    dsn: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = chat(30)
    await store.append(room.pdus)
    point = room.events[25]
    new = [room.message(ALICE, "hello"), room.state_event(ALICE, "m.room.topic", {"topic": "jam"})]
    forgets = Forgets(monkeypatch)
    answers = await Batch(monkeypatch).beside(
        dsn, purging(store, room, point), store.append([event.pdu for event in new])
    )
    assert [answer.outcome for answer in answers] == ["stored", "stored"]
    assert forgets.count == 0
    assert await findings(store) == []
    assert await value(store, "SELECT removals FROM rooms") > 0


async def test_nobody_waits_while_the_rows_of_a_batch_go(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = chat(30)
    await store.append(room.pdus)
    point, parent = room.events[25], room.events[20]
    late = room.at(parent.event_id).message(BOB, "late")
    ahead = HeldBackPurge(monkeypatch)
    [answer] = await ahead.beside(purging(store, room, point), store.append([late.pdu]))
    assert answer.outcome == "stored"
    assert ahead.turns < 4, "what stays makes a gap of its parent, which is no reason to begin anew"
    assert await store.event(parent.event_id) is None
    assert parent.event_id in {gap.event_id for gap in await store.gaps(room.room_id)}
    assert await findings(store) == []


async def test_a_batch_that_something_comes_to_need_is_done_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected event cites one that was being purged: that stays, with the rest of its batch."""
    room = chat(30)
    await store.append(room.pdus)
    point, cited = room.events[25], room.events[24]
    forged = room.topic(BOB, "mine", auth=[cited, *room.events[:2]], expected="rejected")
    ahead = HeldBackPurge(monkeypatch)
    [answer] = await ahead.beside(purging(store, room, point), store.append([forged.pdu]))
    assert answer.outcome == "rejected"
    assert await store.event(cited.event_id) is not None
    assert await findings(store) == []


async def test_a_writer_that_wants_what_has_gone_ahead_comes_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the room and waits for the row, the purge has the row and waits for the room."""
    room = chat(30)
    await store.append(room.pdus)
    point, target = room.events[25], room.events[24]
    redaction = room.redact(ALICE, target.event_id)
    [answer] = await HeldBackPurge(monkeypatch).beside(
        purging(store, room, point), store.append([redaction.pdu]), wait=False
    )
    assert answer.outcome == "stored"
    assert await store.event(target.event_id) is None
    assert await findings(store) == []


async def test_a_parent_that_goes_meanwhile_is_missing(
    dsn: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = chat(30)
    await store.append(room.pdus)
    point, parent = room.events[25], room.events[20]
    late = room.at(parent.event_id).message(BOB, "late")
    [answer] = await Batch(monkeypatch).beside(
        dsn, purging(store, room, point), store.append([late.pdu])
    )
    assert (answer.outcome, answer.missing) == ("missing_parents", (parent.event_id,))
    assert await findings(store) == []
    [answer] = await store.append([late.pdu], state_before=given(late))
    assert answer.outcome == "stored"
    assert parent.event_id in {gap.event_id for gap in await store.gaps(room.room_id)}
    assert await findings(store) == []


async def test_a_redaction_of_what_goes_meanwhile_waits_for_it(
    dsn: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = chat(30)
    await store.append(room.pdus)
    point, target = room.events[25], room.events[24]
    redaction = room.redact(ALICE, target.event_id)
    [answer] = await Batch(monkeypatch).beside(
        dsn, purging(store, room, point), store.append([redaction.pdu])
    )
    assert answer.outcome == "stored"
    assert await findings(store) == []
    await follow_once(store.database, store.streams)
    await store.append([target.pdu], origin="backfill", state_before=given(target))
    back = await store.event(target.event_id)
    assert back is not None
    assert "body" not in back.content
    assert await findings(store) == []


async def test_what_goes_and_is_sent_again_meanwhile_has_its_old_number(
    dsn: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process plans the event as new: its caches have all that it names, but not itself."""
    room = chat(30)
    await store.append(room.pdus)
    point, again = room.events[25], room.events[24]
    nid = await value(
        store, "SELECT event_nid FROM events WHERE event_id = $1::text", again.event_id
    )
    async with storage.open(dsn, server_name=SERVER, instance_name="two", config=ALONE) as two:
        await two.append([room.at(room.events[23].event_id).message(BOB, "beside").pdu])
        assert again.event_id not in two.writer.caches.rows
        [answer] = await Batch(monkeypatch).beside(
            dsn, purging(store, room, point), two.append([again.pdu])
        )
        assert (answer.outcome, answer.missing) == ("missing_parents", again.prev_events)
        [answer] = await two.append([again.pdu], state_before=given(again))
        assert answer.outcome == "stored"
    assert (
        await value(store, "SELECT event_nid FROM events WHERE event_id = $1::text", again.event_id)
        == nid
    )
    assert await findings(store) == []


async def test_a_gap_that_closes_meanwhile_is_none(
    dsn: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event that was missing arrives while the only event goes that named it."""
    room = chat(30)
    lost, child = room.events[20], room.events[21]
    branch = room.at(lost.event_id)
    await store.append(
        [event.pdu for event in room.events if event is not lost], state_before=given(child)
    )
    other = branch.message(BOB, "another child")
    batch = Batch(monkeypatch)
    [answer] = await batch.beside(
        dsn,
        purging(store, room, room.events[25]),
        store.append([other.pdu], state_before=given(other)),
    )
    assert answer.outcome == "stored"
    assert await findings(store) == []
    children = await value(
        store, "SELECT child_nids FROM missing_events WHERE event_id = $1::text", lost.event_id
    )
    nid = await value(
        store, "SELECT event_nid FROM events WHERE event_id = $1::text", other.event_id
    )
    assert children == [nid], "the child that went is none of it"


async def test_what_comes_back_after_the_news_is_no_duplicate(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = chat(30)
    await store.append(room.pdus)
    forgets = Forgets(monkeypatch)
    rows = len(store.writer.caches.rows)
    await purging(store, room, room.events[25])
    facts = await value(
        store, "SELECT count(*) FROM cache_invalidations WHERE cache_name = 'removed'"
    )
    assert 0 < facts < 5, "one a batch"
    await follow_once(store.database, store.streams)
    back = room.events[20:25]
    answers = await store.append(
        [event.pdu for event in back], origin="backfill", state_before=given(*back)
    )
    assert {answer.outcome for answer in answers} == {"stored"}
    assert forgets.count == 1, "at the end of the purge"
    assert rows > len(back)
    assert await findings(store) == []


class WriterPair:
    """Two stores: one of them appends each event, and may or may not have heard of the purge."""

    def __init__(self, stores: Sequence[Store], rng: random.Random) -> None:
        self.outcomes: dict[str, int] = {}
        self._stores = stores
        self._rng = rng

    async def append(self, event: BuiltEvent) -> None:
        """Append the event; where parents are missing, again with the state before it."""
        store = self._rng.choice(self._stores)
        [answer] = await store.append([event.pdu], room_version=event.room_version)
        if answer.outcome == "missing_parents":
            [answer] = await store.append(
                [event.pdu], room_version=event.room_version, state_before=given(event)
            )
        self.outcomes[answer.outcome] = self.outcomes.get(answer.outcome, 0) + 1
        if self._rng.random() < 0.2:
            await follow_once(store.database, store.streams)


@pytest.mark.parametrize("seed", range(ROOMS))
async def test_two_writers_beside_a_purge_in_any_order(
    dsn: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some events are new, some have parents that go, and some are sent again after they went."""
    rng = random.Random(seed)
    shape = LIVELY.replaced(
        fork_rate=0.2,
        fork_depth=4.0,
        odd=replace(ODD_SOME, late=0.0, rejected=0.03, soft_failed=0.03),
    )
    room = build_room(shape, 160, seed=seed, version=str(2 + seed % 11), sign=False)
    old, new = room.events[:110], room.events[110:]
    purge_batches(monkeypatch, rng.choice([5, 20]))
    async with (
        storage.open(dsn, server_name=SERVER, config=ALONE) as first,
        storage.open(dsn, server_name=SERVER, instance_name="two", config=ALONE) as second,
    ):
        await first.append([event.pdu for event in old], room_version=room.version)
        clean = await findings(first)
        writers = WriterPair([first, second], rng)

        async def purge() -> None:
            for point in (old[60], old[100]):
                try:
                    await purge_history(
                        first.database,
                        room.room_id,
                        server_name=SERVER,
                        before_event_id=point.event_id,
                        local=rng.random() < 0.5,
                    )
                except (UnknownEvent, PurgeRefused):
                    continue

        task = asyncio.create_task(purge())
        for event in new:
            await writers.append(event)
            before = rng.choice(old)
            if rng.random() < 0.3:
                await writers.append(room.at(before.event_id).message(before.sender, "late"))
            if rng.random() < 0.3:
                await writers.append(before)
        await task
        assert [one for one in await findings(first) if one not in clean] == []
        assert await value(first, "SELECT removals FROM rooms") > 0
    assert writers.outcomes["stored"] > len(new) // 2


async def test_what_a_purge_has_shown_no_crash_takes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Purged history, once seen as gone, must not come back: clients would lack it for ever."""
    server = EmbeddedPostgres(tmp_path / "server", config=Config(embedded_fsync=False))
    dsn = server.start()
    try:
        await migrate(dsn)
        room = build_room(LIVELY, 120, seed=3, sign=False)
        async with storage.open(dsn, server_name=SERVER, config=ALONE) as store:
            await store.append(room.pdus, room_version=room.version)
        watcher = await asyncpg.connect(dsn)
        before = await watcher.fetchval(TIMELINE)
        purge_batches(monkeypatch, 20)
        resting = replace(ALONE, purge_pause_ms=3_600_000)
        async with await Database.open(dsn, config=resting) as database:
            purge = purge_history(
                database,
                room.room_id,
                server_name=SERVER,
                before_event_id=room.events[100].event_id,
            )
            purging = asyncio.create_task(purge)
            while (seen := await watcher.fetchval(TIMELINE)) == before:
                if purging.done():
                    pytest.fail(f"it rests after its first batch: {await purging}")
            assert server.pid is not None, "psutil would take this process"
            postgres = psutil.Process(server.pid)
            # Postgres' immediate shutdown: it writes nothing more.
            postgres.send_signal(signal.SIGQUIT)
            purging.cancel()
            await asyncio.gather(purging, return_exceptions=True)
        watcher.terminate()
        await asyncio.to_thread(postgres.wait)
        assert server.start() == dsn
        watcher = await asyncpg.connect(dsn)
        assert await watcher.fetchval(TIMELINE) == seen
        await watcher.close()
    finally:
        server.stop()
