"""Censoring: redacted content is gone from the tables, and everything else stays as it was."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

import storage
from storage import Config, InputError, Store
from storage.database import Database
from storage.database.explained import ExplainingConnection
from storage.event import ROOM_VERSIONS, event_id, redact
from storage.event import verify as verify_signature
from storage.event.hashes import canonical
from storage.event.ndjson import read_line
from storage.ids import EventId
from storage.maintenance.archive import archive, rooms_to_archive
from storage.maintenance.censor import SQL_REDACTED, Censored, CensoredEventRow, censor
from storage.rebuild import rebuild
from storage.testing import Odd, RoomBuilder, build_room
from storage.testing.assembly import text
from tests.maintenance.rooms import LIVELY, SERVER, deliver, findings
from tests.persist.tables import logical_tables
from tests.stored_bytes import bytes_of, form, forms_of, store_plainly

ALICE, BOB = "@alice:s1.test", "@bob:s1.test"
SECRET = "the key hangs behind the door"
DAY_MS = 86_400_000


async def raw_bytes(store: Store) -> dict[str, bytes]:
    async with store.database.connection() as conn:
        return await bytes_of(conn._driver)


async def stored_forms(store: Store) -> dict[str, Any]:
    async with store.database.connection() as conn:
        return await forms_of(conn._driver)


def redacted_room(version: str = "11", *, sign: bool = False) -> tuple[RoomBuilder, list[EventId]]:
    """A room, and those of its events whose bytes must go."""
    room = RoomBuilder(version, sign=sign)
    room.start(ALICE)
    room.join(BOB, displayname=SECRET)
    said = room.send(BOB, "m.room.message", {**text(SECRET), "url": f"mxc://s1.test/{SECRET[:3]}"})
    edit = room.edit(BOB, said, SECRET)
    topic = room.topic(ALICE, SECRET)
    member = room.join(BOB, displayname=SECRET + ", still")
    wrong = room.message(ALICE, SECRET, damage="content_hash")
    for target in (said, edit, topic, member):
        room.redact(ALICE, target)
    return room, [event.event_id for event in (said, edit, topic, member, wrong)]


@pytest.mark.parametrize("version", list(ROOM_VERSIONS))
async def test_content_goes_and_ids_signatures_and_answers_stay(store: Store, version: str) -> None:
    room, gone = redacted_room(version, sign=True)
    await store.append(room.pdus, verify_keys=room.keys)
    before, tables = await raw_bytes(store), await logical_tables(store.database)
    answers = await everything_told(store, room)
    assert await censor(store.database, older_than_ms=0) == Censored(censored=len(gone))
    after = await raw_bytes(store)
    assert {form(one) for one in (await stored_forms(store)).values()} <= {0xC1, 0xC2}
    assert {one for one in after if after[one] != before[one]} == set(gone)
    for one in gone:
        assert SECRET.encode() in before[one]
        assert SECRET.encode() not in after[one]
        pdu = json.loads(after[one])
        assert after[one] == canonical(redact(json.loads(before[one]), version))
        assert event_id(pdu, version) == one
        server = pdu["sender"].partition(":")[2]
        [key] = [key for (name, _), key in room.keys.items() if name == server]
        verify_signature(pdu, version, server, key)
    assert await findings(store) == []
    assert await everything_told(store, room) == answers
    assert without_bytes(await logical_tables(store.database)) == without_bytes(tables)
    assert await censor(store.database, older_than_ms=0) == Censored()


async def everything_told(store: Store, room: RoomBuilder) -> list[Any]:
    """All events that a member is shown, in each way in which events are shown."""
    sync = (await store.sync(ALICE, timeline_limit=100)).join[room.room_id]
    pages = [
        await store.messages(room.room_id, ALICE, direction=way, limit=100, aggregations=True)
        for way in ("b", "f")
    ]
    sent = await store.backfill(room.room_id, [room.heads[-1]], 100, server_name="s1.test")
    single = await store.events([event.event_id for event in room.events])
    shown = [
        *sync.timeline.events,
        *pages[0].chunk,
        *pages[1].chunk,
        *sent,
        *(single[event_id] for event_id in sorted(single)),
    ]
    return [
        (event.event_id, event.json, event.pruned, event.redacted_by, event.relations)
        for event in shown
    ]


def without_bytes(tables: dict[str, list[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
    return {
        **tables,
        "events": [
            tuple(value for value in row if not isinstance(value, bytes))
            for row in tables["events"]
        ],
    }


@pytest.mark.parametrize("version", ["6", "8", "10", "11"])
async def test_what_is_still_read_is_left(store: Store, version: str) -> None:
    """And a redacted redaction goes on to redact, a redacted invitation to invite."""
    room = RoomBuilder(version, sign=False, checked=True)
    room.start(ALICE)
    room.join(BOB)
    levels = room.power_levels(ALICE, {"invite": 60, "notifications": {"room": 60}})
    said = room.message(BOB, SECRET)
    redaction = room.redact(ALICE, said, reason=SECRET)
    for target in (levels, redaction):
        room.redact(ALICE, target)
    await store.append(room.pdus, room_version=version)
    done = await censor(store.database, older_than_ms=0)
    # From version 11 on redactions keep `redacts`, and power levels keep `invite`.
    left = 2 if version != "11" else 1
    assert done == Censored(censored=3 - left, left=left)
    assert await findings(store) == []
    assert (await store.events([said.event_id]))[said.event_id].redacted_by == redaction.event_id
    assert SECRET.encode() not in (await raw_bytes(store))[said.event_id]
    assert all(
        "reason" not in event.content
        for event in (await store.messages(room.room_id, BOB, limit=100)).chunk
        if event.redacted_by
    )


async def test_a_partial_room_waits_until_it_is_complete(store: Store) -> None:
    """The whole state may refuse a redaction, and then the bytes are needed again."""
    room, gone = redacted_room("11", sign=False)
    await store.append(room.pdus)
    before = await raw_bytes(store)
    async with store.database.connection() as conn:
        await conn.execute(
            "INSERT INTO partial_rooms (began_ts, room_nid, join_event_id, origin, servers) "
            "SELECT 1, room_nid, '$join', 's2.test', '{}' FROM rooms"
        )
        await censor(store.database, older_than_ms=0)
        assert await raw_bytes(store) == before
        await conn.execute("DELETE FROM partial_rooms")
    assert await censor(store.database, older_than_ms=0) == Censored(censored=len(gone))


async def test_its_time_has_to_come(dsn: str, store: Store) -> None:
    """Censoring is due seven days after the redaction or its target arrived, whichever is later.

    A negative time turns it off.
    """
    room, gone = redacted_room()
    await store.append(room.pdus)
    async with store.database.connection() as conn:
        received = await conn.fetchval("SELECT max(received_ts) FROM events")
        await conn.execute("UPDATE events SET received_ts = $1::bigint", received)
        await conn.execute(
            "UPDATE events SET received_ts = received_ts + 5 WHERE event_id = $1::text", gone[0]
        )
        await conn.execute(
            "UPDATE events SET received_ts = received_ts + 7 WHERE event_nid = "
            "(SELECT redacted_by FROM events WHERE event_id = $1::text)",
            gone[1],
        )
    week = received + 7 * DAY_MS
    for now_ms, due in ((week - 1, 0), (week, 3), (week + 6, 4), (week + 7, 5)):
        assert await censor(store.database, now_ms=now_ms, dry_run=True) == Censored(
            censored=due, waiting=len(gone) - due
        )
    assert await censor(store.database, now_ms=week) == Censored(censored=3, waiting=2)
    async with await Database.open(dsn, config=Config(censor_after_ms=-1)) as switched_off:
        with pytest.raises(
            InputError, match=r"switched off .* --older-than DAYS, older_than_ms in"
        ):
            await censor(switched_off)
        assert (await censor(switched_off, older_than_ms=0, dry_run=True)).censored == 2


@pytest.mark.parametrize("clock", [0, 789_000_000_000])
async def test_a_redaction_that_came_by_a_wrong_clock_is_not_older(
    store: Store, clock: int
) -> None:
    """The messages are years old, the redactions of today; the clock said 1970 or 1995 then."""
    room, gone = redacted_room()
    await store.append(room.pdus)
    now = time.time_ns() // 1_000_000
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET received_ts = $1::bigint WHERE redacted_by IS NOT NULL",
            now - 900 * DAY_MS,
        )
        await conn.execute(
            "UPDATE events SET received_ts = $1::bigint WHERE event_nid IN"
            " (SELECT redacted_by FROM events)",
            clock,
        )
    waiting = Censored(waiting=len(gone))
    assert await censor(store.database) == waiting
    async with store.database.connection() as conn:
        await conn.execute("UPDATE events SET received_ts = received_ts - 8 * $1::bigint", DAY_MS)
    assert (await censor(store.database)).waiting == 0


async def test_a_dry_run_changes_nothing(store: Store) -> None:
    room, gone = redacted_room()
    await store.append(room.pdus)
    before = await raw_bytes(store)
    assert await censor(store.database, older_than_ms=0, dry_run=True, batch=2) == Censored(
        censored=len(gone)
    )
    assert await raw_bytes(store) == before


@pytest.mark.parametrize("batch", [1, 2, 5])
async def test_after_an_interruption_it_goes_on(
    store: Store, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, gone = redacted_room()
    await store.append(room.pdus)
    before = await raw_bytes(store)

    async def interrupt(_: float) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr("storage.database.pace.asyncio.sleep", interrupt)
        with pytest.raises(asyncio.CancelledError):
            await censor(store.database, older_than_ms=0, batch=batch)
    changed = sum(before[one] != now for one, now in (await raw_bytes(store)).items())
    assert changed == min(batch, len(gone))
    async with store.database.connection() as conn:  # caches forget what is committed
        assert await conn.fetchval("SELECT count(*) FROM cache_invalidations") == 1
    assert await censor(store.database, older_than_ms=0, batch=batch) == Censored(
        censored=len(gone) - changed
    )
    assert await findings(store) == []


async def test_what_a_writer_has_in_hand_is_passed_over(store: Store) -> None:
    room, gone = redacted_room()
    await store.append(room.pdus)
    async with store.database.transaction() as conn:
        await conn.execute(
            "SELECT FROM events WHERE event_id = $1::text FOR NO KEY UPDATE", gone[0]
        )
        assert await censor(store.database, older_than_ms=0) == Censored(
            censored=len(gone) - 1, busy=1
        )
    assert await censor(store.database, older_than_ms=0) == Censored(censored=1)


async def test_caches_are_told_once(dsn: str) -> None:
    room, gone = redacted_room()
    async with storage.open(
        dsn, server_name=SERVER, config=Config(cache_reads=True, follow_ms=20)
    ) as store:
        await store.append(room.pdus)
        assert SECRET.encode() in (await store.events(gone[:1]))[gone[0]].raw
        assert len(store.caches.events) == 1
        told = asyncio.Event()
        store.streams.feed.subscribe(
            lambda advance: told.set() if advance.stream_name == "caches" and advance.rows else None
        )
        await censor(store.database, older_than_ms=0, batch=1)
        await asyncio.wait_for(told.wait(), 60)
        assert len(store.caches.events) == 0
        assert SECRET.encode() not in (await store.events(gone[:1]))[gone[0]].raw
        await censor(store.database, older_than_ms=0)
        async with store.database.connection() as conn:
            assert (
                await conn.fetchval(
                    "SELECT count(*) FROM cache_invalidations WHERE cache_name = 'events'"
                )
                == 1
            )


@pytest.mark.parametrize(
    "version,seed",
    [("1", 1), ("2", 2), ("5", 3), ("6", 4), ("9", 5), ("10", 6), ("11", 7), ("12", 8)],
)
async def test_rooms_go_on_as_if_nothing_had_been_censored(
    dsn: str, another_dsn: str, version: str, seed: int
) -> None:
    """Censor half of a random room, then the rest, in a store without caches.

    Compare with the same room without censoring.
    """
    shape = LIVELY.replaced(
        mix={**LIVELY.mix, "redaction": 25, "power": 3},
        odd=Odd(content_hash=0.03, early_redaction=0.03, rejected=0.02),
    )
    room = build_room(shape, 160, seed=seed, sign=False, version=version).generated()
    half = len(room.events) // 2
    tables = []
    for target, censoring in ((dsn, True), (another_dsn, False)):
        for part in (room.events[:half], room.events[half:]):
            async with storage.open(target, server_name=SERVER) as store:
                await deliver(store, replace(room, events=part))
                if censoring:
                    assert (await censor(store.database, older_than_ms=0, batch=7)).censored > 0
                    assert await findings(store) == []
                    await rebuild(store.database, room.room_id, server_name=SERVER)
                    assert await findings(store) == []
        async with storage.open(target, server_name=SERVER) as store:
            tables.append(without_bytes(await logical_tables(store.database)))
    assert tables[0] == tables[1]


async def test_an_export_of_censored_events_is_stored_again(store: Store, another_dsn: str) -> None:
    room, gone = redacted_room()
    await store.append(room.pdus)
    await censor(store.database, older_than_ms=0)
    async with store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        [exported] = await rooms_to_archive(conn)
        lines = [read_line(line) async for lines in archive(conn, exported) for line in lines]
    async with storage.open(another_dsn, server_name=SERVER) as other:
        results = await other.append(
            [line.pdu for line in lines], room_version=exported.room_version
        )
        assert {result.event_id for result in results if result.outcome == "redacted"} >= set(gone)
        assert await raw_bytes(other) == await raw_bytes(store)
        assert await other.current_state(room.room_id) == await store.current_state(room.room_id)
        assert {one: event.redacted_by for one, event in (await other.events(gone)).items()} == {
            one: event.redacted_by for one, event in (await store.events(gone)).items()
        }
        assert await findings(other) == []


@pytest.mark.parametrize(
    "sql",
    [
        (
            "UPDATE events SET encoding = 1 WHERE event_id = (SELECT max(event_id) FROM events "
            "WHERE redacted_by IS NULL AND type_nid = 2)"
        ),
        "UPDATE events SET encoding = 0 WHERE encoding = 1",
        "UPDATE events SET encoding = 7 WHERE encoding = 1",
        "UPDATE events SET redacted_by = NULL, redacted_form = false WHERE encoding = 1",
        (
            "UPDATE events SET "
            "json = convert_to(replace(convert_from(json, 'UTF8'), '{', '{ '), 'UTF8') "
            "WHERE encoding = 1"
        ),
    ],
)
async def test_verify_finds_what_is_censored_wrongly(store: Store, sql: str) -> None:
    room, _ = redacted_room()
    await store.append(room.pdus)
    await censor(store.database, older_than_ms=0)
    await store_plainly(store.database)
    async with store.database.connection() as conn:
        await conn.execute(sql)
    assert "bytes" in {finding.check for finding in await findings(store)}


async def test_what_is_to_be_done_is_found_by_its_index(store: Store) -> None:
    """The query reads only redacted events not censored yet, however many events there are."""
    room, gone = redacted_room()
    for _ in range(1_000):
        room.message(BOB)
    await store.append(room.pdus)
    async with store.database.transaction() as conn:
        await conn.execute("ANALYZE events")
        explaining = ExplainingConnection.over(conn, generic=True)
        await explaining.fetch(SQL_REDACTED, 0, 100, 1 << 60, row=CensoredEventRow)
    [plan] = explaining.plans
    assert "events_uncensored_idx" in plan.indexes
    assert plan.rows_of_tables()["events"] <= 2 * len(gone)
