"""Planning ahead: few round trips, warm and cold.

A plan on top of a write that fails is made again.
"""

import asyncio
from itertools import chain

import pytest

import storage
from storage.persist.commit.group_commit import BATCH_EVENTS_MAX
from storage.persist.load.lookups import SQL_DIGEST
from storage.persist.load.prefetch import SQL_LOAD_BATCH, SQL_LOAD_NAMES
from storage.testing import SHAPES, RoomBuilder, generate_room
from tests.persist.writing import (
    HOLD,
    QUIET,
    REFUSE,
    AnsweredStatements,
    admin_of,
    outcomes,
    room_of,
    stored,
    waiting_write,
)

ROUND_TRIPS_MAX = 4
SQL_STAYS = """
SELECT p.name, (SELECT count(*) FROM unnest(v.audiences)) FROM visibility v
    JOIN principals p USING (principal_nid)
WHERE p.name = ANY($1::text[]) ORDER BY p.name
"""
COLD_ROUND_TRIPS_MAX = (
    20  # of 500 events with forks: 16 were counted, of which the writes are two or three
)


@pytest.mark.parametrize("rooms", [1, 20])
async def test_a_warm_batch_takes_few_round_trips(dsn: str, rooms: int) -> None:
    """Rooms that the process has written before: one lookup of names, and the write.

    They get joins of newcomers, redactions and forks. Where branches meet in a state that none of
    them has, one more query finds it by its digest.
    """
    sent = AnsweredStatements()
    count = writes = 0
    pdus = [
        [event.pdu for event in generate_room(SHAPES["small_chat"], 60 + 600 // rooms, seed=seed)]
        for seed in range(rooms)
    ]
    async with storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store:
        for room in pdus:
            await store.append(room[:60])
        mixed = list(chain.from_iterable(zip(*(room[60:] for room in pdus), strict=True)))
        for at in range(0, len(mixed), BATCH_EVENTS_MAX):
            sent.sent.clear()
            assert outcomes(await store.append(mixed[at : at + BATCH_EVENTS_MAX])) <= {
                "stored",
                "soft_failed",
            }
            assert sent.writes() == 1
            assert len(sent.sent) - sent.sent.count(SQL_DIGEST) <= ROUND_TRIPS_MAX
            count, writes = count + len(sent.sent), writes + sent.writes()
    assert count / writes <= ROUND_TRIPS_MAX - 1


async def test_a_cold_batch_takes_few_round_trips(dsn: str) -> None:
    """A process that has just begun, and 500 events of a room.

    It loads the room's position and the names, and then writes.
    """
    sent = AnsweredStatements()
    room = [event.pdu for event in generate_room(SHAPES["small_chat"], 1_000, seed=7)]
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as store:
        await store.append(room[:500])
    async with storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store:
        sent.sent.clear()
        assert outcomes(await store.append(room[500:])) <= {"stored", "soft_failed"}
    assert sent.sent.count(SQL_LOAD_BATCH) == 1
    assert len(sent.sent) <= COLD_ROUND_TRIPS_MAX, sent.sent


async def test_who_comes_to_a_room_at_hand_is_asked_for_by_the_small_statement(dsn: str) -> None:
    """A member comes back and a stranger joins: the process caches the room, not their visibility.

    The first stay is not forgotten.
    """
    sent = AnsweredStatements()
    room = room_of(1, 0)
    back, stranger = room.user(2, "s1.test"), room.user(3, "s1.test")
    room.history_visibility(room.user(1), "joined")
    room.join(back)
    room.leave(back)
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store,
        admin_of(dsn) as admin,
    ):
        await store.append(room.pdus)
        store.writer.caches.visibility.clear()
        sent.sent.clear()
        newcomers = [room.join(back).pdu, room.join(stranger).pdu]
        assert outcomes(await store.append(newcomers)) == {"stored"}
        assert (sent.sent.count(SQL_LOAD_NAMES), sent.sent.count(SQL_LOAD_BATCH)) == (1, 0)
        stays = await admin.fetch(SQL_STAYS, [back, stranger])
    assert [tuple(row) for row in stays] == [(back, 2), (stranger, 1)]


async def test_what_was_planned_on_a_refused_write_is_planned_again(dsn: str) -> None:
    """Three appends depend on each other: while the first is written the others are planned.

    Then the first is refused.
    """
    sent = AnsweredStatements()
    room = room_of(1, 6)
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store,
        admin_of(dsn) as admin,
    ):
        await store.append(room.pdus[:-6])
        await admin.execute("BEGIN")
        await admin.execute("UPDATE rooms SET write_version = write_version + 1")
        await admin.execute(HOLD)
        first = asyncio.create_task(store.append(room.pdus[-6:-4]))
        await waiting_write(admin)
        others = [
            asyncio.create_task(store.append(room.pdus[at : at + 2 or None])) for at in (-4, -2)
        ]
        await asyncio.sleep(0)
        await admin.execute("COMMIT")
        await admin.execute("SELECT pg_advisory_unlock_all()")
        answers = await asyncio.gather(first, *others)
        assert outcomes(chain.from_iterable(answers)) == {"stored"}
        found = await stored(admin)
        assert [found[one.event_id] for answer in answers for one in answer] == [
            one.stream_ordering for answer in answers for one in answer
        ]
        assert await store.forward_extremities(room.room_id) == {room.events[-1].event_id}
    assert sent.refused() == 1


async def test_a_duplicate_of_what_is_being_written_has_its_position(dsn: str) -> None:
    room = room_of(1, 3)
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET) as store,
        admin_of(dsn) as admin,
    ):
        await store.append(room.pdus[:-3])
        await admin.execute(HOLD)
        first = asyncio.create_task(store.append(room.pdus[-3:]))
        await waiting_write(admin)
        again = asyncio.create_task(store.append(room.pdus[-3:]))
        await asyncio.sleep(0)
        await admin.execute("SELECT pg_advisory_unlock_all()")
        stored_now, duplicates = await first, await again
    assert outcomes(duplicates) == {"duplicate"}
    assert [one.stream_ordering for one in duplicates] == [
        one.stream_ordering for one in stored_now
    ]


async def test_the_beginning_of_a_large_batch_may_be_stored(dsn: str) -> None:
    """The database refuses one event near the end: all before it are stored.

    Repeating the call is safe.
    """
    room = RoomBuilder("11", seed=1, sign=False)
    room.start(room.user(1))
    for _ in range(3 * BATCH_EVENTS_MAX):
        room.message(room.user(1), "x")
    bad = room.events[-5].event_id
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET) as store,
        admin_of(dsn) as admin,
    ):
        await admin.execute(REFUSE)
        await admin.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON events "
            f"FOR EACH ROW WHEN (NEW.event_id = '{bad}') EXECUTE FUNCTION refuse()"
        )
        refused = [one.outcome for one in await store.append(room.pdus)]
        before = list(await stored(admin))
        assert before == [event.event_id for event in room.events[:-5]]
        assert refused == ["stored"] * len(before) + ["invalid"] + ["missing_parents"] * 4
        await admin.execute("DROP TRIGGER refuse ON events")
        results = await store.append(room.pdus)
        assert [one.outcome for one in results] == ["duplicate"] * len(before) + ["stored"] * (
            len(room.events) - len(before)
        )
        assert await store.forward_extremities(room.room_id) == {room.events[-1].event_id}


async def test_what_is_asked_for_is_not_taken_for_absent_while_the_answer_is_on_its_way(
    dsn: str,
) -> None:
    """The first events of a batch are planned meanwhile.

    Who was taken for a stranger would leave a room that they had not come to.
    """
    room = RoomBuilder("11", seed=1)
    admin, guest = room.user(1), "@guest:s3.test"
    room.start(admin)
    room.join(guest)
    room.message(admin)
    beginning = list(room.pdus)
    batch = [room.message(admin), room.leave(guest)]
    sent = AnsweredStatements()
    async with storage.open(dsn, server_name="s1.test", observer=sent) as store:
        await store.append(beginning)
        store.writer.caches.names.principals.clear()  # as for want of space
        store.writer.caches.visibility.clear()
        written = sent.writes()
        results = await store.append([event.pdu for event in batch])
        assert (sent.writes() - written, sent.refused()) == (1, 0)
        assert [result.outcome for result in results] == ["stored"] * 2
        assert (await store.current_state(room.room_id))["m.room.member", guest] == batch[
            1
        ].event_id
        assert await store.visible_to_server("s3.test", [event.event_id for event in batch]) == {
            event.event_id for event in batch
        }
