"""A repair changes nothing in a sound room; writers continue meanwhile, all stores hear of it."""

import asyncio

import pytest

import storage
from storage.database import Database
from storage.database.pool import begun
from storage.errors import DatabaseUnavailable
from storage.persist import Origin
from storage.rebuild import rebuild
from storage.rebuild.shadow_tables import ShadowTables
from storage.testing import (
    ODD_SOME,
    SHAPES,
    BuiltEvent,
    RoomBuilder,
    build_room,
    deliver_late,
    deliver_with_gap,
)
from tests.maintenance.rooms import LIVELY, SERVER, deliver, findings
from tests.persist.tables import logical_tables

UNNUMBERED = (
    "events",
    "states",
    "rooms",
    "current_state",
    "memberships",
    "seen",
    "seen_since",
    "missing_events",
    "waiting_redactions",
)


@pytest.mark.parametrize("shape", ["small_chat", "direct_chat", "join_leave_storm", "fork_heavy"])
@pytest.mark.parametrize("version", ["2", "12"])
async def test_a_sound_room_stays_what_it_is(dsn: str, shape: str, version: str) -> None:
    room = build_room(
        SHAPES[shape].replaced(odd=ODD_SOME), 220, seed=3, version=version, sign=False
    )
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, deliver_with_gap(room, 60, 80), batch=20)
        tables = await logical_tables(store.database)
        await rebuild(store.database, room.room_id, server_name=SERVER)
        after = await logical_tables(store.database)
        for name in UNNUMBERED:
            assert after[name] == tables[name], name
        assert await findings(store) == []


@pytest.mark.parametrize("ends_here", [False, True])
async def test_a_session_that_ends_within_a_rebuild_is_unavailable(
    database: Database, *, ends_here: bool
) -> None:
    with pytest.raises(DatabaseUnavailable):
        async with (
            ShadowTables.opened(database) as shadow,
            begun(shadow.conn),
            shadow.live() as conn,
            database.connection() as other,
        ):
            pid = await conn.fetchval("SELECT pg_backend_pid()")
            assert await other.fetchval("SELECT pg_terminate_backend($1, 10000)", pid)
            if ends_here:
                conn._driver.terminate()
            await conn.fetchval("SELECT 1")


@pytest.mark.parametrize("version", ["11", "12"])
@pytest.mark.parametrize("seed", [0, 5])
async def test_a_room_of_which_the_end_came_first_stays_what_it_is(
    dsn: str, version: str, seed: int
) -> None:
    """Its first event is planned after those of its state, in the order of what these need."""
    room = build_room(SHAPES["direct_chat"], 30, seed=seed, version=version, sign=False)
    before, first, after = room.events[:20], room.events[20], room.events[21:]
    state = sorted(first.state_before.values())
    needed = {*state, *room.graph.auth_chain([*state, first.event_id])}
    deliveries: list[tuple[Origin, list[BuiltEvent]]] = [
        ("outlier", [event for event in before if event.event_id in needed]),
        ("live", [first]),
        ("live", list(after)),
        ("backfill", list(before)),
    ]
    async with storage.open(dsn, server_name=SERVER) as store:
        for origin, events in deliveries:
            await store.append(
                [event.pdu for event in events],
                room_version=version,
                origin=origin,
                state_before={first.event_id: state} if events == [first] else None,
            )
        assert await findings(store) == []
        done = await rebuild(store.database, room.room_id, server_name=SERVER)
        assert done.events == 0
        assert await findings(store) == []


async def test_a_room_goes_on_after_a_rebuild(dsn: str) -> None:
    """The audiences have new numbers; a writer with the old ones in its caches plans again."""
    room = build_room(LIVELY, 240, seed=9, sign=False)
    events = list(deliver_late(room, 4).events)
    async with storage.open(dsn, server_name=SERVER) as store:
        for at in range(0, len(events), 30):
            await store.append(
                [event.pdu for event in events[at : at + 30]], room_version=room.version
            )
            await rebuild(store.database, room.room_id, server_name=SERVER)
            assert await findings(store) == []


async def test_a_repair_beside_appends(dsn: str) -> None:
    room = build_room(LIVELY, 160, seed=2, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus[:20])

        async def repairing() -> None:
            for _ in range(5):
                await rebuild(store.database, room.room_id, server_name=SERVER)

        repairs = asyncio.create_task(repairing())
        for at in range(20, len(room.pdus), 4):
            await store.append(room.pdus[at : at + 4])
        await repairs
        assert await store.current_state(room.room_id) == dict(room.state)
        assert await findings(store) == []


SQL_AS_BEFORE = """
WITH redaction AS (
    UPDATE events
    SET ineffective = false
    WHERE type_nid = 7
    RETURNING event_nid
)
UPDATE events
SET redacted_by = redaction.event_nid, encoding = CASE WHEN $2::boolean THEN 1 ELSE 0 END
FROM redaction
WHERE event_id = $1::text
"""


@pytest.mark.parametrize("censored", [False, True])
async def test_redactions_of_refused_events_that_an_earlier_release_let_take_effect(
    dsn: str, *, censored: bool
) -> None:
    """They are found and mended; but what was taken from the bytes stays redacted."""
    room = RoomBuilder("11", sign=False)
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join(other)
    refused = room.topic(other, "no", expected="rejected")
    redaction = room.redact(admin, refused)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
        async with store.database.connection() as conn:
            await conn.execute(SQL_AS_BEFORE, refused.event_id, censored)
        found = {finding.check for finding in await findings(store)} - {"bytes"}
        assert found == (set() if censored else {"redacted_by", "ineffective"})
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert {finding.check for finding in await findings(store)} - {"bytes"} == set()
        assert (await store.visible_to_user(admin, [redaction.event_id]) == set()) != censored


async def test_caches_hear_of_a_repair(dsn: str) -> None:
    room = build_room(LIVELY, 60, seed=2, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
        async with store.database.connection() as conn:
            await conn.execute("DELETE FROM current_state WHERE state_key_nid = 3")
        store.caches.current_state.forget(None)
        assert ("m.room.power_levels", "") not in await store.current_state(room.room_id)
        await rebuild(store.database, room.room_id, server_name=SERVER)
        await storage.streams.position_poller.follow_once(store.database, store.streams)
        assert await store.current_state(room.room_id) == dict(room.state)


async def test_an_unknown_room(dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        with pytest.raises(storage.UnknownRoom):
            await rebuild(store.database, "!nowhere:s1.test", server_name=SERVER)


async def test_a_room_of_outliers_alone(dsn: str) -> None:
    room = build_room(LIVELY, 30, seed=2, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus[:10], origin="outlier", room_version=room.version)
        assert await findings(store) == []
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert await findings(store) == []
        await store.append(room.pdus)
        assert await findings(store) == []
