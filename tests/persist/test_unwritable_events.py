"""An event that the database refuses is "invalid", and all others are stored."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import asyncpg
import pytest
from signedjson.key import generate_signing_key

import storage
from storage import Store
from storage.errors import ConstraintViolated
from storage.persist import Origin
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.rooms import findings
from tests.persist.writing import QUIET, AnsweredStatements, admin_of, room_of, stored

ADD = "ALTER TABLE events ADD CONSTRAINT bad_year CHECK (origin_server_ts <> ALL ('{%s}'))"
DROP = "ALTER TABLE events DROP CONSTRAINT bad_year"
FIRST = len(room_of(1, 0).events)
INVALID = "invalid", "the database refuses it: bad_year"
RANGE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.origin_server_ts := NEW.origin_server_ts * 9223372036854775807;
    RETURN NEW;
END
$$;
"""


@asynccontextmanager
async def refusing(
    dsn: str, rooms: Iterable[RoomBuilder], bad: Iterable[BuiltEvent]
) -> AsyncIterator[tuple[Store, asyncpg.Connection, AnsweredStatements]]:
    """Open a store with the first four events of the rooms, and refuse the bad events."""
    sent = AnsweredStatements()
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, observer=sent) as store,
        admin_of(dsn) as admin,
    ):
        for room in rooms:
            await store.append(room.pdus[:FIRST])
        await admin.execute(ADD % ",".join(str(one.json["origin_server_ts"]) for one in bad))
        sent.sent.clear()
        yield store, admin, sent


def messages(room: RoomBuilder) -> list[BuiltEvent]:
    return list(room.events[FIRST:])


async def test_the_others_of_its_batch_are_stored(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its child is not, because its parent is missing; the log has ids, and no content."""
    room = room_of(1, 20)
    good = messages(room)
    side = room.at(room.events[8])
    bad = side.message(side.user(1), "a secret")
    child = side.message(side.user(1), "child")
    batch = [*good[:7], bad, child, *good[7:]]
    async with refusing(dsn, [room], [bad]) as (store, admin, sent):
        results = await store.append([one.pdu for one in batch])
        found = {one.event_id: (one.outcome, one.reason) for one in results}
        assert found.pop(bad.event_id) == INVALID
        assert found.pop(child.event_id)[0] == "missing_parents"
        assert {outcome for outcome, _ in found.values()} == {"stored"}
        assert set(await stored(admin)) == {one.event_id for one in (*room.events[:FIRST], *good)}
        assert [(one.event_id, one.stream_ordering) for one in results if one.is_stored] == list(
            (await stored(admin)).items()
        )[-len(found) :]
        [record] = [one for one in caplog.records if one.levelno >= logging.ERROR]
        assert (record.event_id, record.room_id, record.constraint) == (  # type: ignore[attr-defined]
            bad.event_id,
            room.room_id,
            "bad_year",
        )
        assert "secret" not in caplog.text
        assert store.measures.unwritable_events == 1
        assert sent.writes() <= 2 * (1 + 2 * len(batch).bit_length())
        await admin.execute(DROP)
        again = await store.append([one.pdu for one in batch])
        assert [one.outcome for one in again if one.event_id in {bad.event_id, child.event_id}] == [
            "stored"
        ] * 2
        assert await findings(store) == []


@pytest.mark.parametrize("count", [1, 5, 50])
async def test_many_of_them_take_few_writes_each(dsn: str, count: int) -> None:
    room = room_of(1, 200)
    good, last = messages(room), room.events[-1]
    bad = [room.at(last).message(room.user(1), f"bad {number}") for number in range(count)]
    batch = [*good, *bad]
    async with refusing(dsn, [room], bad) as (store, _, sent):
        results = await store.append([one.pdu for one in batch])
        assert [one.outcome for one in results] == ["stored"] * 200 + ["invalid"] * count
        assert sent.writes() <= 4 * count * len(batch).bit_length()
        assert store.measures.unwritable_events == count


async def test_other_callers_are_not_harmed(dsn: str) -> None:
    """Their appends go into the same write, and so do those that wait meanwhile."""
    rooms = [room_of(seed, 6) for seed in range(10)]
    bad = messages(rooms[4])[3]
    async with refusing(dsn, rooms, [bad]) as (store, admin, _):
        answers = await asyncio.gather(
            *(store.append([one.pdu for one in messages(room)]) for room in rooms),
            *(store.append([messages(room)[0].pdu]) for room in rooms),
        )
        for room, answer in zip(rooms, answers[: len(rooms)], strict=True):
            expected = ["stored"] * 6
            if room is rooms[4]:
                expected = ["stored"] * 3 + ["invalid"] + ["missing_parents"] * 2
            assert [one.outcome for one in answer] == expected
        assert [one.outcome for [one] in answers[len(rooms) :]] == ["duplicate"] * 10
        await admin.execute(DROP)
        await store.append([one.pdu for one in messages(rooms[4])])
        assert await findings(store) == []


@pytest.mark.parametrize("origin", ["live", "backfill", "outlier"])
async def test_each_origin(dsn: str, origin: Origin) -> None:
    """A state event that is refused leaves no trace in the state."""
    room = room_of(1, 2)
    batch = [room.topic(room.user(1), "good"), room.topic(room.user(1), "bad")]
    sides = [room.at(batch[0]).topic(room.user(1), f"side {number}") for number in range(2)]
    async with refusing(dsn, [room], batch[1:]) as (store, _, _):
        await store.append([one.pdu for one in messages(room)[:2]])
        pdus = [one.pdu for one in (*batch, *sides)]
        results = await store.append(pdus, origin=origin)
        assert [one.outcome for one in results] == ["stored", "invalid", "stored", "stored"]
        assert results[1].reason == INVALID[1]
        assert await findings(store) == []


async def test_an_event_that_is_sent_raises(dsn: str) -> None:
    """Events of others that wait for the same write are stored."""
    room = room_of(1, 3)
    key = generate_signing_key("1")
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, signing_key=key) as store,
        admin_of(dsn) as admin,
    ):
        await store.append(room.pdus[:-3])
        await admin.execute(ADD % 1995)
        before = len(await stored(admin))
        sends = [
            store.send(room.room_id, room.user(1), "m.room.message", {"body": "x"}, timestamp_ms=ts)
            for ts in (1994, 1995, 1996)
        ]
        answers = await asyncio.gather(
            *sends,
            *(store.append([one.pdu]) for one in room.events[-3:]),
            return_exceptions=True,
        )
        failed = answers.pop(1)
        assert isinstance(failed, ConstraintViolated)
        assert failed.constraint == "bad_year"
        assert not any(isinstance(one, BaseException) for one in answers)
        assert len(await stored(admin)) == before + 5
        assert await findings(store) == []


async def test_a_value_that_the_database_cannot_hold(dsn: str) -> None:
    room = room_of(1, 5)
    bad = messages(room)[2]
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET) as store,
        admin_of(dsn) as admin,
    ):
        await admin.execute(RANGE)
        await admin.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON events "
            f"FOR EACH ROW WHEN (NEW.event_id = '{bad.event_id}') EXECUTE FUNCTION refuse()"
        )
        results = await store.append(room.pdus)
        assert [one.outcome for one in results] == [
            *["stored"] * (len(room.events) - 3),
            "invalid",
            *["missing_parents"] * 2,
        ]
        assert results[-3].reason == "the database refuses it: SQLSTATE 22003"
