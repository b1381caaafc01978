"""The writer: many appends in few writes, and a failing one fails alone.

A close, a cancellation or a cut connection loses nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain

import asyncpg
import pytest

import storage
from storage import AppendResult, Store
from storage.errors import CommitUnknown, StorageClosed
from storage.persist.write.messages_only import SQL_WRITE_ONE_MESSAGE
from storage.testing import RoomBuilder
from tests.persist.writing import (
    HOLD,
    QUIET,
    REFUSE,
    WRITES,
    AnsweredStatements,
    admin_of,
    listen,
    outcomes,
    room_of,
    stored,
    waiting_write,
)


@asynccontextmanager
async def counted(
    dsn: str, rooms: Sequence[RoomBuilder], *, last: int
) -> AsyncIterator[tuple[Store, asyncpg.Connection, AnsweredStatements]]:
    """Open a store that has the rooms without their last events, and count from then on."""
    sent = AnsweredStatements()
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store,
        admin_of(dsn) as admin,
    ):
        for room in rooms:
            await store.append(room.pdus[:-last])
        sent.sent.clear()
        yield store, admin, sent


# --------------------------------------------------------------------------------------------------
# group commit


async def test_appends_of_many_tasks_and_rooms_go_into_one_write(dsn: str) -> None:
    rooms = [room_of(seed, 8) for seed in range(8)]
    async with counted(dsn, rooms, last=8) as (store, admin, sent):
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
            assert sent.sent == [SQL_WRITE_ONE_MESSAGE]


async def test_while_one_write_is_under_way_the_others_gather(dsn: str) -> None:
    rooms = [room_of(seed, 1) for seed in range(10)]
    async with counted(dsn, rooms, last=1) as (store, admin, sent):
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
    rooms = [room_of(seed, 100) for seed in range(3)]
    async with counted(dsn, rooms, last=100) as (store, admin, sent):
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
            "CREATE TRIGGER refuse BEFORE INSERT ON events "
            f"FOR EACH ROW WHEN (NEW.event_id = '{bad}') EXECUTE FUNCTION refuse()"
        )
        answers = await asyncio.gather(*(store.append(room.pdus[-1:]) for room in rooms))
        [failed] = answers.pop(4)
        assert failed == AppendResult(bad, "invalid", "the database refuses it: refused")
        assert [one.outcome for [one] in answers] == ["stored"] * 9
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


async def test_a_cancelled_close_leaves_no_append_without_a_result(dsn: str) -> None:
    """It is not known of the running write. Nothing else is written any more."""
    room = room_of(1, 4)
    async with admin_of(dsn) as admin, asyncio.timeout(60):
        async with storage.open(dsn, server_name="s1.test", config=QUIET) as store:
            await store.append(room.pdus[:-4])
            await admin.execute(HOLD)
            appends = [asyncio.create_task(store.append([room.pdus[-4]]))]
            await waiting_write(admin)
            appends += [asyncio.create_task(store.append([pdu])) for pdu in room.pdus[-3:]]
            while store.writer.queued or store.writer.in_hand < 4:  # noqa: ASYNC110  # no signal
                await asyncio.sleep(0)  # until all are planned
            closing = asyncio.create_task(store.writer.close())
            await asyncio.sleep(0)
            closing.cancel()
            results = await asyncio.gather(*appends, return_exceptions=True)
            assert [type(result) for result in results] == [CommitUnknown, *[StorageClosed] * 3]
            assert closing.cancelled()
            with pytest.raises(StorageClosed):
                await store.append(room.pdus[-1:])
            await admin.execute("SELECT pg_advisory_unlock_all()")
        assert set(await stored(admin)) == {event.event_id for event in room.events[:-3]}


@pytest.mark.parametrize("where", ["_plan", "_taken"])
async def test_a_defect_of_the_writer_leaves_no_append_without_a_result(
    dsn: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Later appends are refused, and the log and the close have the defect."""
    room = room_of(1, 2)
    with pytest.raises(ZeroDivisionError):
        async with (
            asyncio.timeout(60),
            storage.open(dsn, server_name="s1.test", config=QUIET) as store,
        ):
            await store.append(room.pdus[:-2])
            writer = store.writer
            working = getattr(writer, where)

            def defective() -> object:
                if where == "_taken" and asyncio.current_task() is not writer._writing:
                    return working()
                raise ZeroDivisionError

            monkeypatch.setattr(writer, where, defective)
            if where == "_taken":  # by the task of the write, after it has committed
                await store.append(room.pdus[-2:-1])
            for _ in range(2):
                with pytest.raises(StorageClosed):
                    await store.append(room.pdus[-1:])
    assert "the writer has stopped, by a defect" in caplog.text


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


async def test_appends_of_cancelled_callers_do_not_exceed_the_queue(dsn: str) -> None:
    """Callers that time out and try again would queue without limit while a write hangs."""
    room = room_of(1, 10)
    config = replace(QUIET, writer_queue_max=3)
    async with (
        storage.open(dsn, server_name="s1.test", config=config) as store,
        admin_of(dsn) as admin,
    ):
        await store.append(room.pdus[:-10])
        await admin.execute(HOLD)
        for pdu in room.pdus[-10:]:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await store.append([pdu])
        assert store.writer.in_hand == 3
        await admin.execute("SELECT pg_advisory_unlock_all()")
        answers = await asyncio.gather(*[store.append([pdu]) for pdu in room.pdus[-10:]])
        assert [answer.outcome for [answer] in answers] == ["duplicate"] * 3 + ["stored"] * 7
        assert store.writer.in_hand == 0


# --------------------------------------------------------------------------------------------------
# lost connections


# --------------------------------------------------------------------------------------------------
# many processes


async def test_calls_are_stored_in_their_order_where_the_room_must_be_looked_up_first(
    dsn: str,
) -> None:
    """On connections of their own, the look-ups could end in any order.

    A child would then come before its parent.
    """
    room = RoomBuilder("11")
    room.start("@alice:s1.test")
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(room.pdus)
    for _ in range(10):
        messages = [room.message("@alice:s1.test") for _ in range(20)]
        async with storage.open(dsn, server_name="s1.test") as cold:
            results = await asyncio.gather(*(cold.append([message.pdu]) for message in messages))
        assert [result.outcome for [result] in results] == ["stored"] * 20
