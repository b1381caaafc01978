"""Purges of whole rooms, and retention."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from storage import (
    Config,
    PurgeRefused,
    ResyncNeeded,
    Store,
    UnknownRoom,
)
from storage.ids import UserId
from storage.maintenance.purge import (
    PurgeJob,
    purge_retention,
    purge_room,
)
from storage.maintenance.purge.run import lifetime_ms
from storage.streams.position_poller import follow_once
from storage.testing import RoomBuilder, build_room
from tests.maintenance.purging import ALICE, BOB, FOLLOWED, PurgeKilled, chat, value
from tests.maintenance.rooms import LIVELY, SERVER, findings


async def referring(store: Store) -> dict[str, list[str]]:
    """The tables of the catalogue with such columns."""
    async with store.database.connection() as conn:
        rows: list[str] = await conn.fetchvals(
            "SELECT c.relname || '.' || a.attname FROM pg_attribute a "
            "JOIN pg_class c ON c.oid = a.attrelid "
            "WHERE c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace "
            "AND a.attnum > 0 AND NOT a.attisdropped "
            "AND (a.attname ~ '(room|event|redaction|child|chain)_nids?$' "
            "OR a.attname ~ '^state_group(_|$)' OR a.attname ~ 'audience'"
            "  OR a.attname IN ('prev_events', 'auth_events', 'forward_extremities', "
            "'redacted_by', 'room_id', 'event_id'))"
        )
    tables: dict[str, list[str]] = {}
    for row in rows:
        table, _, column = row.partition(".")
        tables.setdefault(table, []).append(column)
    return tables


async def test_no_table_with_a_reference_is_forgotten(store: Store) -> None:
    """If you add a table that refers to rooms or events, add it to the purge and to this list."""
    assert set(await referring(store)) == FOLLOWED


async def test_a_whole_room_leaves_nothing(store: Store) -> None:
    room, other = build_room(LIVELY, 150, seed=4, sign=False), chat(10)
    await store.append(other.pdus)
    kept = {
        name: await value(store, f"SELECT count(*) FROM {name}")
        for name in FOLLOWED - {"purge_jobs"}
    }
    await store.append(room.pdus, room_version=room.version)
    user = UserId(
        next(event.sender for event in room.events if event.sender.endswith(f":{SERVER}"))
    )
    room_nid = await value(
        store, "SELECT room_nid FROM rooms WHERE room_id = $1::text", room.room_id
    )
    with pytest.raises(PurgeRefused, match="is joined"):
        await purge_room(store.database, room.room_id, server_name=SERVER)
    killed = 0

    async def kill(job: PurgeJob) -> None:
        nonlocal killed
        killed += 1
        if killed < 4:
            raise PurgeKilled

    while True:
        try:
            purged = await purge_room(
                store.database, room.room_id, server_name=SERVER, force=True, watcher=kill
            )
        except PurgeKilled:
            assert room.room_id not in await store.rooms_of(user)
            assert room.room_id not in (await store.sync(user)).join
            continue
        break
    assert purged.events == len(room.events)
    await follow_once(store.database, store.streams)
    tables = await referring(store)
    for table, columns in tables.items():
        if "room_nid" in columns and table != "purge_jobs":
            assert (
                await value(
                    store, f"SELECT count(*) FROM {table} WHERE room_nid = $1::int", room_nid
                )
                == 0
            ), table
    assert {name: await value(store, f"SELECT count(*) FROM {name}") for name in kept} == kept
    assert await findings(store) == []
    with pytest.raises(UnknownRoom):
        await purge_room(store.database, room.room_id, server_name=SERVER)
    results = await store.append(room.pdus, room_version=room.version)
    assert {result.outcome for result in results} <= {"stored", "soft_failed"}, "it can come back"
    assert await findings(store) == []


def retention(content: dict[str, Any]) -> bytes:
    return json.dumps({"content": content}).encode()


def test_lifetimes_lie_within_the_limits_of_the_operator() -> None:
    day = 86_400_000
    config = Config()
    assert lifetime_ms(None, config) is None
    assert lifetime_ms(retention({"max_lifetime": 5 * day}), config) == 5 * day
    assert lifetime_ms(retention({"max_lifetime": 1}), config) == day
    for odd in ("5", True, -1, 0, None, 1.5):
        assert lifetime_ms(retention({"max_lifetime": odd}), config) is None
        assert (
            lifetime_ms(
                retention({"max_lifetime": odd}), replace(config, retention_lifetime_ms_default=3)
            )
            == 3
        )
    assert (
        lifetime_ms(
            retention({"max_lifetime": 50 * day}),
            replace(config, retention_lifetime_ms_max=9 * day),
        )
        == 9 * day
    )


async def test_rooms_keep_what_their_policy_says(store: Store) -> None:
    day = 86_400_000
    keeps, forgets = RoomBuilder("11", seed=1), chat(11)
    keeps.start(ALICE, name="The attic")
    for number in range(10):
        keeps.message(ALICE, f"message {number}")
    forgets.state_event(ALICE, "m.room.retention", {"max_lifetime": 2 * day})
    await store.append(keeps.pdus)
    await store.append(forgets.pdus)
    now = time.time_ns() // 1_000_000
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET received_ts = $1::bigint WHERE topological_ordering < 10 "
            "OR room_nid = (SELECT room_nid FROM rooms WHERE room_id = $2::text)",
            now - 3 * day,
            keeps.room_id,
        )
    purged = [one async for one in purge_retention(store.database, server_name=SERVER)]
    assert [(one.room_id, one.events) for one in purged] == [(forgets.room_id, 9)]
    assert await findings(store) == []
    assert [one async for one in purge_retention(store.database, server_name=SERVER)] == []


async def test_a_whole_room_without_users_leaves_tokens_of_others_good(store: Store) -> None:
    """A client that already has the room's last membership change gets nothing.

    A client without it must sync again from the start.
    """
    room, other = chat(5), RoomBuilder("11", seed=1)
    other.start(ALICE, name="Elsewhere")
    await store.append([*other.pdus, *room.pdus])
    before = (await store.sync(ALICE)).next_batch
    room.leave(ALICE)
    await store.append(room.pdus[-1:])
    after = (await store.sync(ALICE, since=before)).next_batch
    room.message(BOB, "alone")
    await store.append(room.pdus[-1:])
    await purge_room(store.database, room.room_id, server_name=SERVER)
    await follow_once(store.database, store.streams)
    assert (await store.sync(ALICE, since=after)).join == {}
    with pytest.raises(ResyncNeeded):
        await store.sync(ALICE, since=before)


async def test_a_whole_room_that_users_are_in_has_them_begin_anew(store: Store) -> None:
    room = chat(5)
    await store.append(room.pdus[:-1])
    since = (await store.sync(ALICE)).next_batch
    await store.append(room.pdus[-1:])
    await purge_room(store.database, room.room_id, server_name=SERVER, force=True)
    await follow_once(store.database, store.streams)
    with pytest.raises(ResyncNeeded):
        await store.sync(ALICE, since=since)
