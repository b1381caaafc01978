"""Purging hand-made rooms: the purge point, returning events, interruptions, concurrent writers.

Also whole rooms and retention.
"""

import asyncio
import time

import pytest

from storage import (
    Config,
    DatabaseFull,
    PurgeRefused,
    PurgeRunning,
    ResyncNeeded,
    Store,
    UnknownEvent,
    UnknownRoom,
)
from storage.database import Database
from storage.errors import InputError
from storage.maintenance.purge import PurgeJob, jobs, purge_history, resume, run
from storage.persist.room_lock import lock_room
from storage.testing import RoomBuilder, build_room
from tests.maintenance.purging import ALICE, BOB, PurgeKilled, chat, purge, value
from tests.maintenance.rooms import LIVELY, SERVER, findings
from tests.small_limits import purges_in_batches

CONFIG = Config(purge_pause_ms=0)
small_batches = purges_in_batches(5)


@pytest.fixture
def config() -> Config:
    return CONFIG


async def test_history_goes_and_what_is_kept_answers(store: Store) -> None:
    room = chat(40)
    await store.append(room.pdus)
    states = [await store.state_before(event.event_id) for event in room.events[30:]]
    page = await store.messages(room.room_id, ALICE, limit=15)
    since = (await store.sync(ALICE)).next_batch
    assert await purge(store, room, 30) == 30
    assert await findings(store) == []
    assert [await store.state_before(event.event_id) for event in room.events[30:]] == states
    left = await store.messages(room.room_id, ALICE, limit=100)
    assert [event.event_id for event in left.chunk] == [
        event.event_id for event in reversed(room.events[30:])
    ]
    assert [event.event_id for event in left.chunk[:15]] == [
        event.event_id for event in page.chunk
    ][: len(left.chunk)]
    assert [gap.event_id for gap in await store.gaps(room.room_id)] == [room.events[29].event_id]
    assert room.events[29].event_id in {one for gap in left.gaps for one in gap.backfill_from}
    assert (
        await store.events([event.event_id for event in room.events[20:30] if event.sender == BOB])
        == {}
    )
    kept = await store.events([event.event_id for event in room.events[20:30]])
    assert {event.sender for event in kept.values()} == {ALICE}, (
        "only this server may hold what its users sent"
    )
    assert await store.current_state(room.room_id) == dict(room.state)
    assert await store.sync(ALICE, since=since) is not None


async def test_a_client_from_before_begins_anew(store: Store) -> None:
    room = chat(20)
    await store.append(room.pdus[:10])
    old = (await store.sync(ALICE)).next_batch
    await store.append(room.pdus[10:])
    await purge(store, room, 15)
    with pytest.raises(ResyncNeeded):
        await store.sync(ALICE, since=old)
    upto = await value(store, "SELECT purged_upto FROM purged_streams WHERE stream_name = 'events'")
    assert upto < await value(
        store,
        "SELECT stream_ordering FROM events WHERE event_id = $1::text",
        room.events[15].event_id,
    )


async def test_purging_twice_takes_nothing_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "COUNTED", 4)
    room = chat(20)
    await store.append(room.pdus)
    assert await purge(store, room, 15, dry_run=True) == 15
    assert await purge(store, room, 15) == 15
    counts = await value(
        store, "SELECT (SELECT count(*) FROM events) * 1000 + (SELECT count(*) FROM missing_events)"
    )
    assert await purge(store, room, 15) == 0
    with pytest.raises(UnknownEvent):
        await purge(store, room, 10, local=True)
    assert (
        await value(
            store,
            "SELECT (SELECT count(*) FROM events) * 1000 + (SELECT count(*) FROM missing_events)",
        )
        == counts
    )


async def test_what_local_users_sent_goes_when_it_is_asked_for(store: Store) -> None:
    room = chat(20)
    await store.append(room.pdus)
    await purge(store, room, 15)
    assert await value(store, "SELECT count(*) FROM purge_retained_events WHERE local") > 0
    room.message(ALICE, "later")
    room.message(ALICE, "later still")
    await store.append(room.pdus[-2:])
    await purge(store, room, 18, local=True)
    assert await findings(store) == []
    held = await store.events([event.event_id for event in room.events[8:15]])
    assert held == {}, "no message of before is held"


async def test_points_that_cannot_be(store: Store) -> None:
    room, other = chat(5), RoomBuilder("11", seed=1)
    other.start(ALICE, name="Elsewhere")
    await store.append(room.pdus)
    await store.append(other.pdus)
    database = store.database
    everything = await value(store, "SELECT count(*) FROM events")
    with pytest.raises(UnknownRoom):
        await purge_history(
            database,
            "!nowhere:s1.test",
            server_name=SERVER,
            before_event_id=room.events[3].event_id,
        )
    with pytest.raises(UnknownEvent):
        await purge_history(database, room.room_id, server_name=SERVER, before_event_id="$unknown")
    with pytest.raises(PurgeRefused, match="another room"):
        await purge_history(
            database, room.room_id, server_name=SERVER, before_event_id=other.events[-1].event_id
        )
    with pytest.raises(PurgeRefused, match="future"):
        await purge_history(
            database,
            room.room_id,
            server_name=SERVER,
            before_ts=time.time_ns() // 1_000_000 + 60_000,
        )
    with pytest.raises(InputError, match="either"):
        await purge_history(database, room.room_id, server_name=SERVER)
    async with database.connection() as conn:
        await conn.execute(
            "UPDATE events SET topological_ordering = 1000 WHERE event_id = $1::text",
            room.events[4].event_id,
        )
    with pytest.raises(PurgeRefused, match="above the forward extremities"):
        await purge_history(
            database, room.room_id, server_name=SERVER, before_event_id=room.events[4].event_id
        )
    assert await value(store, "SELECT count(*) FROM events") == everything
    assert await jobs(database) == []


async def test_before_a_time(store: Store) -> None:
    room = chat(20)
    await store.append(room.pdus)
    now = time.time_ns() // 1_000_000
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET received_ts = $1::bigint - (20 - topological_ordering) * 1000", now
        )
    first = await value(
        store, "SELECT received_ts FROM events WHERE event_id = $1::text", room.events[9].event_id
    )
    assert (
        await purge_history(
            store.database, room.room_id, server_name=SERVER, before_ts=first - 999_999
        )
    ).events == 0
    assert (
        await purge_history(store.database, room.room_id, server_name=SERVER, before_ts=first)
    ).events == 9
    assert (
        await purge_history(store.database, room.room_id, server_name=SERVER, before_ts=first + 1)
    ).events == 1
    assert (
        await purge_history(store.database, room.room_id, server_name=SERVER, before_ts=now)
    ).events > 5
    assert len((await store.messages(room.room_id, ALICE, limit=100)).chunk) >= 1
    assert await findings(store) == []


async def test_two_at_once(store: Store) -> None:
    room = chat(30)
    await store.append(room.pdus)

    async def second(_: PurgeJob) -> None:
        with pytest.raises(PurgeRunning):
            await purge(store, room, 20)
        assert [one async for one in resume(store.database, server_name=SERVER)] == []

    assert await purge(store, room, 20, watcher=second) == 20


@pytest.mark.parametrize("local", [False, True])
async def test_killed_between_any_two_batches(store: Store, *, local: bool) -> None:
    """Wherever it ends, the room is whole; and the next call goes on."""
    room = build_room(LIVELY, 120, seed=3, sign=False)
    await store.append(room.pdus, room_version=room.version)
    states = {
        event.event_id: await store.state_before(event.event_id) for event in room.events[90:]
    }
    kills = 0
    while True:
        left = kills + 1  # each time one transaction more, so it comes to an end

        async def kill(_: PurgeJob) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise PurgeKilled

        try:
            done = await purge(store, room, 90, local=local, watcher=kill)
        except PurgeKilled:
            kills += 1
            [job] = await jobs(store.database)
            assert job.finished_ts is None
            assert await findings(store) == []
            continue
        break
    assert done > 0
    assert kills > 5
    assert await findings(store) == []
    assert {event_id: await store.state_before(event_id) for event_id in states} == states
    assert [job.phase for job in await jobs(store.database)] == ["done"]


class FullDiskObserver:
    """An observer that lets so many statements pass, and then says that the disk is full."""

    def __init__(self, passing: int) -> None:
        self.passing = passing

    def before(self, statement: str) -> None:  # noqa: ARG002  # the observer's interface
        self.passing -= 1
        if self.passing == 0:
            raise DatabaseFull("no space left on device")

    def after(self, statement: str, seconds: float) -> None:
        pass


async def test_a_full_disk_at_any_statement(dsn: str, store: Store) -> None:
    """The error is ours, the room is whole, the job has the reason, and the next call resumes."""
    room = build_room(LIVELY, 60, seed=3, sign=False)
    await store.append(room.pdus, room_version=room.version)
    failures, reasons = 0, set[str | None]()
    while True:
        async with await Database.open(
            dsn, config=CONFIG, observer=FullDiskObserver(2 + 3 * failures)
        ) as database:
            try:
                await purge_history(
                    database,
                    room.room_id,
                    server_name=SERVER,
                    before_event_id=room.events[40].event_id,
                )
            except DatabaseFull:
                failures += 1
            else:
                break
        reasons.update(job.error for job in await jobs(store.database) if job.finished_ts is None)
        if failures % 5 == 0:
            assert await findings(store) == []
    assert failures > 10
    assert reasons == {"no space left on device"}
    assert await findings(store) == []


async def test_beside_appends_and_syncs(store: Store) -> None:
    room = build_room(LIVELY, 300, seed=8, sign=False)
    await store.append(room.pdus[:150], room_version=room.version)
    since = (await store.sync(room.events[0].sender)).next_batch
    done = False

    async def purging() -> None:
        nonlocal done
        for at in (60, 100, 140):
            await purge(store, room, at)
        done = True

    task = asyncio.create_task(purging())
    at = 150
    while at < 300 or not done:
        for event in room.events[at : at + 2]:
            [result] = await store.append([event.pdu], room_version=room.version)
            assert result.outcome in {"stored", "soft_failed"}
        at += 2
        since = (await store.sync(room.events[0].sender, since=since)).next_batch
        await asyncio.sleep(0)
    await task
    assert await store.current_state(room.room_id) == dict(room.state)
    assert await findings(store) == []


REFERENCES = (
    "room_nid",
    "event_nid",
    "event_nids",
    "state_group",
    "redaction_nid",
    "chain_nid",
    "child_nids",
    "prev_event_nid",
)
"""Tables with a column that refers to a room, an event, a state group or a chain.

A purge takes care of each of these.
"""


async def test_calls_keep_their_order_while_a_room_is_taken_again_and_again(store: Store) -> None:
    """A child is never planned before its parent.

    This holds although a purge refuses the plans of writers and makes them drop their caches.
    """
    room = chat(400)
    await store.append(room.pdus[:20])
    held = 0

    async def taking() -> None:
        nonlocal held
        while True:
            async with store.database.transaction() as conn:
                await lock_room(conn, room.room_id)
                held += 1

    task = asyncio.create_task(taking())
    calls = []
    for start in range(20, len(room.pdus), 10):
        calls += [asyncio.create_task(store.append([pdu])) for pdu in room.pdus[start : start + 10]]
        await calls[-10]
    answers = await asyncio.gather(*calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held > 10
    assert {result.outcome for [result] in answers} == {"stored"}
