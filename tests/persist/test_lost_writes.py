"""Writes that are cut off: a killed backend, a lost answer, a killed process."""

import asyncio
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import chain

import pytest

import storage
from storage import AppendResult, Store
from storage.errors import CommitUnknown, DatabaseUnavailable
from storage.streams import account_data
from storage.streams.feed import StreamRow
from storage.streams.position_poller import follow_once
from storage.testing import RoomBuilder
from tests.pausing import pause
from tests.persist.append_process import room_of as process_room
from tests.persist.writing import (
    HOLD,
    QUIET,
    WRITES,
    AnsweredStatements,
    admin_of,
    listen,
    lossy,
    outcomes,
    room_of,
    stored,
    waiting_write,
)


async def test_a_backend_that_is_killed_in_mid_write(dsn: str) -> None:
    """Nothing of the write was done: it is made again."""
    room = room_of(1, 10)
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET) as store,
        admin_of(dsn) as admin,
    ):
        await store.append(room.pdus[:-10])
        told = listen(store)
        await admin.execute(HOLD)
        append = asyncio.create_task(store.append(room.pdus[-10:]))
        await admin.execute("SELECT pg_terminate_backend($1, 5000)", await waiting_write(admin))
        await admin.execute("SELECT pg_advisory_unlock_all()")
        results = await append
        assert outcomes(results) == {"stored"}
        found = await stored(admin)
        assert [found[result.event_id] for result in results] == [
            result.stream_ordering for result in results
        ]
        assert [fact.stream_id for fact in told] == [result.stream_ordering for result in results]
        assert outcomes(await store.append(room.pdus)) == {"duplicate"}


async def test_a_write_whose_answer_is_lost_was_done(dsn: str) -> None:
    """The outcome is looked up: the results are the write's, and its facts are published once."""
    room = room_of(1, 10)
    async with lossy(dsn) as (eater, store), admin_of(dsn) as admin:
        await store.append(room.pdus[:-10])
        await store.append(room.pdus[-10:-5])  # prepares the statement
        told = listen(store)
        eater.eat(*WRITES)
        results = await store.append(room.pdus[-5:])
        assert eater.eaten.is_set()
        assert outcomes(results) == {"stored"}
        found = await stored(admin)
        assert [found[result.event_id] for result in results] == [
            result.stream_ordering for result in results
        ]
        assert [fact.stream_id for fact in told] == [result.stream_ordering for result in results]
        assert store.streams["events"].linear() == results[-1].stream_ordering
        assert not store.streams.is_writing("events")
        assert outcomes(await store.append(room.pdus)) == {"duplicate"}
        assert len(await stored(admin)) == len(room.events)


async def test_a_lost_commit_under_the_locks(dsn: str) -> None:
    """The second way of writing, in a transaction: the answer to its COMMIT is lost."""
    room = room_of(1, 10)
    async with lossy(dsn) as (eater, store), admin_of(dsn) as admin:
        await store.append(room.pdus[:-10])
        # The first write is refused.
        await admin.execute("UPDATE rooms SET write_version = write_version + 1")
        eater.eat("COMMIT")
        results = await store.append(room.pdus[-10:])
        assert eater.eaten.is_set()
        assert outcomes(results) == {"stored"}
        assert len(await stored(admin)) == len(room.events)


async def test_nobody_to_ask_what_became_of_it(dsn: str) -> None:
    """A clear error: the ids stay locked until the outcome is known, then the facts are published.

    Repeating the append returns "duplicate".
    """
    room = room_of(1, 10)
    async with lossy(dsn) as (eater, store), admin_of(dsn) as admin:
        await store.append(room.pdus[:-10])
        await store.append(room.pdus[-10:-5])
        told = listen(store)
        before = store.streams["events"].linear()
        eater.eat(*WRITES)
        eater.away = True
        with pytest.raises(CommitUnknown):
            await store.append(room.pdus[-5:])
        assert store.streams.is_writing("events")
        with pytest.raises(DatabaseUnavailable):
            await store.append(room.pdus[-5:])
        eater.away = False
        assert store.streams["events"].linear() == before
        await follow_once(store.database, store.streams)
        assert [fact.row[0] for fact in told] == [event.event_id for event in room.events[-5:]]
        assert store.streams["events"].linear() == told[-1].stream_id
        assert outcomes(await store.append(room.pdus)) == {"duplicate"}
        assert len(await stored(admin)) == len(room.events)


async def test_a_backend_still_at_work_after_its_connection_is_gone(dsn: str) -> None:
    """Until the backend has ended, no position may pass its ids.

    So the store ends it, and writes again.
    """
    room = room_of(1, 10)
    async with lossy(dsn) as (eater, store), admin_of(dsn) as admin:
        await store.append(room.pdus[:-10])
        await admin.execute(HOLD)
        append = asyncio.create_task(store.append(room.pdus[-10:]))
        pid = await waiting_write(admin)
        eater.cut()
        while await admin.fetchval("SELECT true FROM pg_stat_activity WHERE pid = $1", pid):
            await pause()
        await admin.execute("SELECT pg_advisory_unlock_all()")
        assert outcomes(await append) == {"stored"}
        assert set(await stored(admin)) == {event.event_id for event in room.events}


async def test_a_session_that_another_caller_has_since_is_left_alone(dsn: str) -> None:
    """The write runs into its time limit, and its session goes to the next caller."""
    room = room_of(1, 1)
    config = replace(QUIET, statement_timeout_ms=2_000, pool_size_max=2, prepare_ahead=False)
    async with (
        storage.open(dsn, server_name="s1.test", config=config) as store,
        admin_of(dsn) as admin,
    ):
        await store.append(room.pdus[:-1])
        await admin.execute(HOLD)
        async with AsyncExitStack() as first, AsyncExitStack() as next_one:
            await first.enter_async_context(store.database.connection())
            append = asyncio.create_task(store.append(room.pdus[-1:]))
            pid = await waiting_write(admin)
            conn = await next_one.enter_async_context(store.database.connection())
            assert conn.backend_pid == pid
            await admin.execute("SELECT pg_advisory_unlock_all()")
            await first.aclose()
            assert outcomes(await append) == {"stored"}
            assert await conn.fetchval("SELECT pg_backend_pid()") == pid
        assert set(await stored(admin)) == {event.event_id for event in room.events}


async def test_a_small_stream_whose_answer_is_lost(dsn: str) -> None:
    """A message to a device is not sent twice, and is published once."""
    user = storage.UserId("@user1:s1.test")
    async with lossy(dsn) as (eater, store):
        await store.account_data.set(user, "m.first", {})
        told: list[StreamRow] = []
        store.streams.feed.subscribe(lambda advance: told.extend(advance.rows))
        eater.eat(account_data.SQL_SET)
        at = await store.account_data.set(user, "m.second", {})
        assert eater.eaten.is_set()
        assert [(fact.stream_id, fact.row) for fact in told] == [(at, [user, None, "m.second"])]
        assert store.streams["account_data"].linear() == at
        with pytest.raises(storage.UnknownRoom):
            await store.account_data.set(
                user, "m.tag", {}, room_id=storage.RoomId("!nowhere:s1.test")
            )
        assert not store.streams.is_writing("account_data")


async def _append_all(
    store: Store, pdus: Sequence[bytes], rng: random.Random
) -> list[AppendResult]:
    results: list[AppendResult] = []
    at = 0
    while at < len(pdus):
        size = rng.choice([1, 2, 5])
        results += await store.append(pdus[at : at + size])
        at += size
    return results


async def test_two_writers_in_one_room(dsn: str) -> None:
    """Each plans on what it knows.

    The other's writes make its plans stale, and every append succeeds all the same.
    """
    room = RoomBuilder("11", seed=1, sign=False)
    one, other = room.user(1), room.user(2)
    room.start(one)
    room.join(other)
    base = len(room.pdus)
    branches = room.fork(2)
    for number in range(60):
        for branch, user in zip(branches, (one, other), strict=True):
            branch.message(user, f"{number}")
            if number % 10 == 0:
                branch.join(user, displayname=f"{number}")
    shares = [
        [event.pdu for event in room.events[base:] if event.json["sender"] == user]
        for user in (one, other)
    ]
    seen = (AnsweredStatements(), AnsweredStatements())
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, observer=seen[0]) as first,
        storage.open(
            dsn, server_name="s1.test", instance_name="second", config=QUIET, observer=seen[1]
        ) as second,
        admin_of(dsn) as admin,
    ):
        await first.append(room.pdus[:base])
        answers = await asyncio.gather(
            *(
                _append_all(store, share, random.Random(1))
                for store, share in zip((first, second), shares, strict=True)
            )
        )
        assert outcomes(chain.from_iterable(answers)) == {"stored"}
        room.merge(*branches)
        last = room.message(one, "both")
        assert outcomes(await second.append(room.pdus[-1:])) == {"stored"}
        assert await first.state_before(last.event_id) == dict(last.state_before)
        for event in room.events[base::7]:
            assert await first.state_before(event.event_id) == dict(event.state_before)
        assert await first.forward_extremities(room.room_id) == {last.event_id}
        assert len(await stored(admin)) == len(room.events)
    assert seen[0].refused() + seen[1].refused() > 0, "they never met"


async def _kill_and_restart(dsn: str, number: int, rng: random.Random) -> int:
    """Kill an appending process three times; return how many events it reported as stored."""
    at = 0
    for _ in range(3):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.persist.append_process",
            dsn,
            f"p{number}",
            str(number),
            str(at),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        for _ in range(rng.randint(5, 40)):
            at = int(await process.stdout.readline())
        process.kill()
        await process.wait()
    return at


@pytest.mark.timeout(300)
async def test_a_killed_process(dsn: str) -> None:
    """No committed event is missing from the stream, and it has only stored events.

    Every event that was reported as stored is stored.
    """
    config = storage.Config(follow_ms=50)
    async with (
        storage.open(dsn, server_name="s1.test", instance_name="reader", config=config) as reader,
        admin_of(dsn) as admin,
    ):
        told = listen(reader)
        said = await asyncio.gather(
            *(_kill_and_restart(dsn, number, random.Random(number)) for number in range(2))
        )
        found = await stored(admin)
        while reader.streams["events"].linear() < max(found.values()):
            await follow_once(reader.database, reader.streams)
        facts = await reader.streams["events"].rows(0, reader.streams["events"].linear(), 1_000_000)
    assert [(fact.row[0], fact.stream_id) for fact in facts] == list(found.items())
    assert sorted((fact.stream_id, fact.row[0]) for fact in told) == [
        (position, event_id) for event_id, position in found.items()
    ]
    for number, count in enumerate(said):
        events = [event.event_id for event in process_room(number).events]
        assert set(events[:count]) <= found.keys()
