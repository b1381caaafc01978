"""The writer: many appends in few writes, one that fails answered alone, nothing lost at a close, a cancellation or a cut connection."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import chain

import asyncpg
import pytest

import storage
from storage import AppendResult, Store
from storage.errors import CommitUnknown, DatabaseUnavailable, StorageClosed
from storage.persist.write.all_tables import SQL_WRITE
from storage.persist.write.messages_only import SQL_WRITE_PLAIN
from storage.streams import account_data
from storage.streams.feed import Advance, Fact
from storage.streams.position_poller import follow_once
from storage.testing import RoomBuilder
from tests.persist.append_process import room_of as process_room
from tests.persist.connection_breaker import AnswerEater

QUIET = storage.Config(follow_ms=3_600_000)
ONE_CONNECTION = storage.Config(follow_ms=3_600_000, pool_size_max=1)
WRITES = (SQL_WRITE, SQL_WRITE_PLAIN)

STORED = "SELECT event_id, stream_ordering FROM events WHERE NOT outlier ORDER BY stream_ordering"
WAITING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
HOLD = "SELECT pg_advisory_lock(1919905645, room_nid) FROM rooms"
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'not this one' USING ERRCODE = 'check_violation', CONSTRAINT = 'refused';
END
$$;
"""


class AnsweredStatements:
    """An observer that counts what is sent, and what of it is answered."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.answered: list[str] = []

    def before(self, statement: str) -> None:
        self.sent.append(statement)

    def after(self, statement: str, _: float) -> None:
        self.answered.append(statement)

    def writes(self) -> int:
        return sum(statement in WRITES for statement in self.sent)

    def refused(self) -> int:
        return self.writes() - sum(statement in WRITES for statement in self.answered)


def room_of(seed: int, messages: int) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed, sign=False)
    room.start(room.user(1))
    for _ in range(messages):
        room.message(room.user(1), "x")
    return room


@asynccontextmanager
async def admin_of(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def lossy(dsn: str) -> AsyncIterator[tuple[AnswerEater, Store]]:
    """A store behind a proxy that loses answers; with one connection."""
    async with (
        AnswerEater(dsn) as eater,
        storage.open(
            eater.dsn, server_name="s1.test", config=ONE_CONNECTION, observer=eater
        ) as store,
    ):
        yield eater, store


async def waiting_write(admin: asyncpg.Connection) -> int:
    """The backend of a write that waits for its room, once there is one."""
    while (pid := await admin.fetchval(WAITING)) is None:
        pass
    return int(pid)


async def stored(admin: asyncpg.Connection) -> dict[str | None, int]:
    return {row[0]: row[1] for row in await admin.fetch(STORED)}


def listen(store: Store) -> list[Fact]:
    told: list[Fact] = []

    def hear(advance: Advance) -> None:
        if advance.stream_name == "events":
            told.extend(advance.facts)

    store.streams.feed.subscribe(hear)
    return told


def outcomes(results: Iterable[AppendResult]) -> set[str]:
    return {result.outcome for result in results}


# ------------------------------------------------------------------------------------------------------------
# group commit


async def test_appends_of_many_tasks_and_rooms_go_into_one_write(dsn: str) -> None:
    sent = AnsweredStatements()
    rooms = [room_of(seed, 8) for seed in range(8)]
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store,
        admin_of(dsn) as admin,
    ):
        for room in rooms:
            await store.append(room.pdus[:-8])
        sent.sent.clear()
        answers = await asyncio.gather(
            *(store.append(room.pdus[-8:]) for room in rooms for _ in range(8))
        )
        assert sent.writes() <= 2
        assert len(sent.sent) <= 8
        found = await stored(admin)
    outcome = [result.outcome for answer in answers for result in answer]
    assert outcome.count("stored") == 64
    assert outcome.count("duplicate") == 64 * 7
    assert all(
        found[result.event_id] == result.stream_ordering
        for answer in answers
        for result in answer
        if result.outcome == "stored"
    )


async def test_a_lone_append_is_one_round_trip(dsn: str) -> None:
    sent = AnsweredStatements()
    room = room_of(1, 20)
    async with storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store:
        await store.append(room.pdus[:-10])
        for pdu in room.pdus[-10:]:
            sent.sent.clear()
            assert outcomes(await store.append([pdu])) == {"stored"}
            assert sent.sent == [SQL_WRITE_PLAIN]


async def test_while_one_write_is_under_way_the_others_gather(dsn: str) -> None:
    sent = AnsweredStatements()
    rooms = [room_of(seed, 1) for seed in range(10)]
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store,
        admin_of(dsn) as admin,
    ):
        for room in rooms:
            await store.append(room.pdus[:-1])
        sent.sent.clear()
        await admin.execute(HOLD)
        first = asyncio.create_task(store.append(rooms[0].pdus[-1:]))
        await waiting_write(admin)
        others = [asyncio.create_task(store.append(room.pdus[-1:])) for room in rooms[1:]]
        await asyncio.sleep(0)
        await admin.execute("SELECT pg_advisory_unlock_all()")
        assert outcomes(chain.from_iterable(await asyncio.gather(first, *others))) == {"stored"}
    assert sent.writes() == 2


async def test_one_half_is_written_while_the_other_is_planned(dsn: str) -> None:
    """And the second half is sent before those of the first hear of their answers."""
    answered: list[int] = []
    heard: list[int] = []  # when each write began, how many had heard

    class Watching(AnsweredStatements):
        def before(self, statement: str) -> None:
            super().before(statement)
            if statement in WRITES:
                heard.append(len(answered))

    async def append(store: Store, pdus: list[bytes]) -> AppendResult:
        [result] = await store.append(pdus)
        answered.append(1)
        return result

    rooms = [room_of(seed, 1) for seed in range(64)]
    async with storage.open(dsn, server_name="s1.test", config=QUIET, observer=Watching()) as store:
        await store.append([pdu for room in rooms for pdu in room.pdus[:-1]], room_version="11")
        heard.clear()
        results = await asyncio.gather(*(append(store, room.pdus[-1:]) for room in rooms))
    assert outcomes(results) == {"stored"}
    assert heard == [0, 0]


async def test_a_batch_is_one_write_alone_and_beside_others(dsn: str) -> None:
    sent = AnsweredStatements()
    rooms = [room_of(seed, 100) for seed in range(3)]
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store,
        admin_of(dsn) as admin,
    ):
        for room in rooms:
            await store.append(room.pdus[:-100])
        sent.sent.clear()
        await store.append(rooms[0].pdus[-100:])
        await asyncio.gather(*(store.append(room.pdus[-100:]) for room in rooms[1:]))
        assert sent.writes() <= 3
        for room in rooms:
            of_room = (
                "SELECT count(DISTINCT xmin::text) FROM events WHERE event_id = ANY($1::text[])"
            )
            assert (
                await admin.fetchval(of_room, [event.event_id for event in room.events[-100:]]) == 1
            )


async def test_one_that_fails_is_answered_alone(dsn: str) -> None:
    rooms = [room_of(seed, 1) for seed in range(10)]
    bad = rooms[4].events[-1].event_id
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET) as store,
        admin_of(dsn) as admin,
    ):
        for room in rooms:
            await store.append(room.pdus[:-1])
        await admin.execute(REFUSE)
        await admin.execute(
            f"CREATE TRIGGER refuse BEFORE INSERT ON events FOR EACH ROW WHEN (NEW.event_id = '{bad}') EXECUTE FUNCTION refuse()"
        )
        answers = await asyncio.gather(
            *(store.append(room.pdus[-1:]) for room in rooms), return_exceptions=True
        )
        failed = answers.pop(4)
        assert isinstance(failed, storage.ConstraintViolated)
        assert failed.constraint == "refused"
        assert [one[0].outcome for one in answers if not isinstance(one, BaseException)] == [
            "stored"
        ] * 9
        assert bad not in await stored(admin)
        await admin.execute("DROP TRIGGER refuse ON events")
        assert outcomes(await store.append(rooms[4].pdus)) == {"duplicate", "stored"}


async def test_a_full_queue_makes_callers_wait(dsn: str) -> None:
    room = room_of(1, 12)
    config = storage.Config(follow_ms=3_600_000, writer_queue_max=3, writer_batch_max=1)
    async with (
        storage.open(dsn, server_name="s1.test", config=config) as store,
        admin_of(dsn) as admin,
    ):
        await store.append(room.pdus[:-12])
        await admin.execute(HOLD)
        appends = [asyncio.create_task(store.append([pdu])) for pdu in room.pdus[-12:]]
        await waiting_write(admin)
        assert len(store.writer._queue) <= 2, "one is being written"
        await admin.execute("SELECT pg_advisory_unlock_all()")
        assert outcomes(chain.from_iterable(await asyncio.gather(*appends))) == {"stored"}


async def test_a_close_loses_nothing_that_was_accepted(dsn: str) -> None:
    room = room_of(1, 30)
    async with admin_of(dsn) as admin:
        async with storage.open(dsn, server_name="s1.test", config=QUIET) as store:
            await store.append(room.pdus[:-30])
            await admin.execute(HOLD)
            appends = [asyncio.create_task(store.append([pdu])) for pdu in room.pdus[-30:-1]]
            await waiting_write(admin)
            closing = asyncio.create_task(store.writer.close())
            await asyncio.sleep(0)
            with pytest.raises(StorageClosed):
                await store.append(room.pdus[-1:])
            await admin.execute("SELECT pg_advisory_unlock_all()")
            await closing
            assert outcomes(chain.from_iterable(await asyncio.gather(*appends))) == {"stored"}
        assert set(await stored(admin)) == {event.event_id for event in room.events[:-1]}


async def test_a_cancelled_caller_harms_nobody(dsn: str) -> None:
    room = room_of(1, 10)
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET) as store,
        admin_of(dsn) as admin,
    ):
        await store.append(room.pdus[:-10])
        told = listen(store)
        await admin.execute(HOLD)
        appends = [asyncio.create_task(store.append([pdu])) for pdu in room.pdus[-10:]]
        await waiting_write(admin)
        appends[0].cancel()
        appends[5].cancel()
        await admin.execute("SELECT pg_advisory_unlock_all()")
        answers = await asyncio.gather(*appends, return_exceptions=True)
        assert [type(answer) is asyncio.CancelledError for answer in answers] == [
            number in (0, 5) for number in range(10)
        ]
        assert set(await stored(admin)) == {event.event_id for event in room.events}
        assert [fact.row[0] for fact in told] == [event.event_id for event in room.events[-10:]]
        assert outcomes(await store.append(room.pdus)) == {"duplicate"}


# ---------------------------------------------------------------------------------------------------------
# lost connections


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
    """The outcome is looked up: the answers are those that the write would have given, and its facts are told once."""
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
        await admin.execute(
            "UPDATE rooms SET write_version = write_version + 1"
        )  # the first way is refused
        eater.eat("COMMIT")
        results = await store.append(room.pdus[-10:])
        assert eater.eaten.is_set()
        assert outcomes(results) == {"stored"}
        assert len(await stored(admin)) == len(room.events)


async def test_nobody_to_ask_what_became_of_it(dsn: str) -> None:
    """A clear error; the ids stay held until it is known, then the facts are told; repeating answers "duplicate"."""
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
    """Until it has ended, no position may pass what it may have taken; so it is ended, and the write made again."""
    room = room_of(1, 10)
    async with lossy(dsn) as (eater, store), admin_of(dsn) as admin:
        await store.append(room.pdus[:-10])
        await admin.execute(HOLD)
        append = asyncio.create_task(store.append(room.pdus[-10:]))
        pid = await waiting_write(admin)
        eater.cut()
        while await admin.fetchval("SELECT true FROM pg_stat_activity WHERE pid = $1", pid):
            pass
        await admin.execute("SELECT pg_advisory_unlock_all()")
        assert outcomes(await append) == {"stored"}
        assert set(await stored(admin)) == {event.event_id for event in room.events}


async def test_a_small_stream_whose_answer_is_lost(dsn: str) -> None:
    """A message to a device is not sent twice, and is told once."""
    user = storage.UserId("@user1:s1.test")
    async with lossy(dsn) as (eater, store):
        await store.account_data.set(user, "m.first", {})
        told: list[Fact] = []
        store.streams.feed.subscribe(lambda advance: told.extend(advance.facts))
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


# -----------------------------------------------------------------------------------------------------------
# many processes


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
    """Each builds on what it knows; the other's writes make its plans stale, and every append succeeds all the same."""
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
    """An appending process that is killed three times; how many of its events it said to be stored."""
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
    """No committed event is missing from the stream, and none is told that is not stored; what was answered is stored."""
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


async def test_calls_are_stored_in_their_order_where_the_room_must_be_looked_up_first(
    dsn: str,
) -> None:
    """Each on a connection of its own, the look-ups would end in any order, and a child would come before its parent."""
    room = RoomBuilder("11")
    room.start("@alice:s1.test")
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(room.pdus)
    for _ in range(10):
        messages = [room.message("@alice:s1.test") for _ in range(20)]
        async with storage.open(dsn, server_name="s1.test") as cold:
            results = await asyncio.gather(*(cold.append([message.pdu]) for message in messages))
        assert [result.outcome for [result] in results] == ["stored"] * 20
