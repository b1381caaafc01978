"""Garbage of state groups: what nothing refers to goes, every answer stays, also beside appends."""

import asyncio

import pytest

import storage
from storage import Store
from storage.maintenance.state_group_gc import (
    _delete,
    collect,
    collect_all,
    find,
)
from storage.testing import RoomBuilder, build_room
from tests.maintenance.rooms import LIVELY, SERVER, deliver, everything_seen, findings
from tests.persist.tables import logical_tables
from tests.postgres import others_ended

FORKY = LIVELY.replaced(fork_rate=0.3, fork_depth=3.0)


@pytest.fixture(scope="module")
def room() -> RoomBuilder:
    return build_room(FORKY, 220, seed=5, sign=False)


async def count(store: Store) -> int:
    async with store.database.connection() as conn:
        return int(await conn.fetchval("SELECT count(*) FROM state_groups"))


async def forget_events(store: Store, events: int) -> None:
    """Remove the state of the latest events, as a purge would.

    Their groups are then garbage, unless other groups fold them.
    """
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET state_group_before = (SELECT min(state_group_before) FROM events "
            "WHERE NOT outlier), state_group_after = NULL "
            "WHERE event_nid IN (SELECT event_nid FROM events WHERE NOT outlier "
            "ORDER BY stream_ordering LIMIT $1::int)",
            events,
        )


async def test_what_nothing_refers_to_goes_and_every_answer_stays(
    store: Store, room: RoomBuilder
) -> None:
    # One at a time: every merge on the way leaves a group.
    await deliver(store, room.generated(), batch=1)
    before, tables = await count(store), await logical_tables(store.database)
    seen = await everything_seen(store, room, [event.event_id for event in room.events])
    await others_ended(store.database)
    garbage = (await find(store.database, room.room_id)).state_groups
    assert len(garbage) > 5, "a room without garbage says nothing"
    freed = await collect(store.database, room.room_id, batch=3)
    assert freed.state_groups == len(garbage)
    assert await count(store) == before - freed.state_groups
    assert await logical_tables(store.database) == tables
    assert await everything_seen(store, room, seen[SERVER]) == {
        name: ids & seen[SERVER] for name, ids in seen.items()
    }
    assert await findings(store) == []
    assert [one async for one in collect_all(store.database)] == []


async def test_the_room_goes_on_after_collecting(store: Store, room: RoomBuilder) -> None:
    """Also by a writer that had the groups in its caches."""
    generated = room.generated()
    for event in generated.events[:150]:
        await store.append([event.pdu])
    await others_ended(store.database)
    assert (await collect(store.database, room.room_id)).state_groups
    for event in generated.events[150:]:
        [result] = await store.append([event.pdu])
        assert result.outcome in {"stored", "soft_failed"}
    assert await store.current_state(room.room_id) == dict(room.state)
    assert await findings(store) == []


async def test_collecting_beside_appends(dsn: str, room: RoomBuilder) -> None:
    """There is garbage from the start: some is freed in whatever order collector and writer run."""
    appended = asyncio.Event()

    async def collecting(store: Store) -> int:
        freed = 0
        while not appended.is_set():
            freed += (await collect(store.database, room.room_id, batch=3)).state_groups
        return freed

    async with storage.open(
        dsn, server_name=SERVER, config=storage.Config(purge_pause_ms=1)
    ) as store:
        for pdu in room.pdus[:150]:
            await store.append([pdu])
        await others_ended(store.database)
        collector = asyncio.create_task(collecting(store))
        for at in range(150, len(room.pdus), 3):
            results = await store.append(room.pdus[at : at + 3])
            assert {result.outcome for result in results} <= {"stored", "soft_failed"}
        appended.set()
        assert await collector
        assert await store.current_state(room.room_id) == dict(room.state)
        assert await findings(store) == []


async def test_a_group_that_was_taken_up_again_since_the_look_is_kept(
    store: Store, room: RoomBuilder
) -> None:
    """The second look, under the room's lock: an event now has a group that was garbage before."""
    await deliver(store, room.generated(), batch=1)
    await others_ended(store.database)
    garbage = await find(store.database, room.room_id)
    wanted = garbage.state_groups[-1]
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET state_group_before = $1::bigint, stream_ordering = $2::bigint + 1 "
            "WHERE stream_ordering = $2::bigint AND state_group_after IS NULL",
            wanted,
            garbage.upto,
        )
        referred = await conn.fetchval(
            "SELECT count(*) FROM events WHERE state_group_before = $1::bigint", wanted
        )
        path: list[int] = await conn.fetchval(
            "SELECT path_of(state_group) FROM state_groups WHERE state_group = $1::bigint",
            wanted,
        )
    assert referred == 1
    freed = await _delete(store.database, room.room_id, garbage)
    assert freed == len(set(garbage.state_groups) - set(path))
    async with store.database.connection() as conn:
        assert await conn.fetchval(
            "SELECT count(*) FROM state_groups WHERE state_group = ANY($1::bigint[])", path
        ) == len(path)


async def test_what_a_group_folds_that_was_written_since_is_kept(
    store: Store, room: RoomBuilder
) -> None:
    """As by a merge that was overtaken: no event has the group, but its readers need its path."""
    await deliver(store, room.generated(), batch=1)
    await others_ended(store.database)
    garbage = await find(store.database, room.room_id)
    async with store.database.connection() as conn:
        path: list[int] = await conn.fetchval(
            "SELECT path FROM (SELECT path_of(state_group) AS path FROM state_groups "
            "WHERE state_group = ANY($1::bigint[])) AS g ORDER BY cardinality(path) DESC LIMIT 1",
            garbage.state_groups,
        )
        new = await conn.fetchval("SELECT max(state_group) + 1 FROM state_groups")
        await conn.execute(
            "INSERT INTO state_groups (state_group, digest, audience, room_nid, entry_count, "
            "runs, back) "
            "SELECT $2::bigint, 1, audience, room_nid, entry_count, runs, $3::int[] "
            "FROM state_groups WHERE state_group = $1::bigint",
            path[-1],
            new,
            [*(new - one for one in sorted(path)), 0],
        )
    freed = await _delete(store.database, room.room_id, garbage)
    assert 0 < freed == len(set(garbage.state_groups) - set(path))
    async with store.database.connection() as conn:
        assert await conn.fetchval(
            "SELECT count(*) FROM state_groups WHERE state_group = ANY($1::bigint[])", path
        ) == len(path)
