"""Deletions and repairs refuse a corrupt index: nothing changes, and the error says REINDEX."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from storage import Store
from storage.database.connection import Database
from storage.errors import StorageCorrupt
from storage.maintenance.censor import censor
from storage.maintenance.purge import purge_history, purge_retention, purge_room, resume
from storage.maintenance.state_group_gc import collect, collect_all
from storage.rebuild import rebuild, repair_positions
from storage.testing import RoomBuilder, build_room
from tests.cli.running import room_storage_beside
from tests.maintenance.damaging import not_ready, rows_of_all_tables
from tests.maintenance.rooms import LIVELY, SERVER, findings
from tests.postgres import others_ended

Work = Callable[[Store, RoomBuilder], Awaitable[Any]]


async def collect_every_room(store: Store, _: RoomBuilder) -> None:
    async for _one in collect_all(store.database):
        pass


async def purge_by_policy(store: Store, _: RoomBuilder) -> None:
    async for _one in purge_retention(store.database, server_name=SERVER):
        pass


async def resume_purges(store: Store, _: RoomBuilder) -> None:
    async for _one in resume(store.database, server_name=SERVER):
        pass


async def purge_half(store: Store, room: RoomBuilder) -> None:
    await purge_history(
        store.database, room.room_id, server_name=SERVER, before_event_id=room.events[100].event_id
    )


WORKS: dict[str, Work] = {
    "gc": lambda store, room: collect(store.database, room.room_id),
    "gc of every room": collect_every_room,
    "purge": purge_half,
    "purge of a room": lambda store, room: purge_room(
        store.database, room.room_id, server_name=SERVER, force=True
    ),
    "retention": purge_by_policy,
    "resumed purges": resume_purges,
    "censor": lambda store, _: censor(store.database, older_than_ms=0),
    "repair": lambda store, room: rebuild(store.database, room.room_id, server_name=SERVER),
    "repair of positions": lambda store, _: repair_positions(store.database),
    "rebuild of visibility": lambda store, room: rebuild(
        store.database, room.room_id, server_name=SERVER
    ),
}
LIARS: dict[str, Sequence[str]] = {
    "topological": ["events_room_topological_idx"],
    "stream": ["events_room_stream_idx"],
    "time": ["events_out_of_order_idx"],
    "all of a room": [
        "events_room_topological_idx",
        "events_room_stream_idx",
        "events_out_of_order_idx",
    ],
    "groups": ["state_groups_pkey"],
    "redacted": ["events_uncensored_idx"],
}


async def lying(store: Store, indexes: Sequence[str]) -> RoomBuilder:
    """A room of whose last 80 events these indexes have the very last only."""
    room = build_room(LIVELY, 198, seed=4, sign=False)
    first = room.events[0]
    room.message(first.sender, "out of time order", ts=first.json["origin_server_ts"])
    room.message(first.sender, "the very last")
    for at in range(0, 120, 40):
        await store.append(room.pdus[at : at + 40])
    async with store.database.connection() as conn, not_ready(conn, indexes):
        await store.append(room.pdus[120:-1], room_version=room.version)
    await store.append(room.pdus[-1:], room_version=room.version)
    return room


CASES = [
    (work, liars)
    for work in WORKS
    for liars in ("all of a room", "groups")
    if (work, liars) != ("censor", "groups")
]


@pytest.mark.parametrize(
    "work,liars", [*CASES, ("censor", "redacted"), ("gc", "time"), ("purge", "stream")]
)
async def test_nothing_is_done_by_an_index_that_lies(store: Store, work: str, liars: str) -> None:
    indexes = LIARS[liars]
    room = await lying(store, indexes)
    async with store.database.connection() as conn:
        rows = await rows_of_all_tables(conn)
    with pytest.raises(StorageCorrupt, match="REINDEX") as caught:
        await WORKS[work](store, room)
    assert caught.value.ids["indexes"] == sorted(indexes)
    assert str(caught.value).endswith("then `room-storage verify`")  # the hint can be copied
    async with store.database.connection() as conn:
        assert await rows_of_all_tables(conn) == rows
        for index in indexes:
            await conn.execute(f"REINDEX INDEX {index}")
    assert await findings(store) == []
    await WORKS[work](store, room)
    assert await findings(store) == []


@pytest.mark.parametrize("liars", LIARS)
async def test_verify_names_the_index_and_blames_no_fact(
    dsn: str, store: Store, liars: str
) -> None:
    indexes = LIARS[liars]
    await lying(store, indexes)
    assert [(finding.check, finding.subject) for finding in await findings(store)] == [
        ("indexes", (index,)) for index in sorted(indexes)
    ]
    done = await room_storage_beside("verify", "--dsn", dsn)
    assert done.returncode == 1
    assert "REINDEX" in done.stdout
    done = await room_storage_beside("verify", "--repair", "--dsn", dsn)
    assert done.returncode == 1
    assert f"REINDEX INDEX CONCURRENTLY {indexes[0]}" in done.stderr


async def test_gc_without_the_proof_deletes_states_that_are_in_use(dsn: str, store: Store) -> None:
    """What the refusal is for. A room this small would be read without an index."""
    room = await lying(store, LIARS["all of a room"])
    async with store.database.connection() as conn:
        await conn.execute(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET enable_seqscan = off', "
            "current_database()); END $$"
        )
    await others_ended(store.database)
    async with await Database.open(dsn) as database:
        assert (await collect(database, room.room_id, indexes_compared=True)).state_groups
    store.caches.states.forget(None)
    with pytest.raises(StorageCorrupt):
        await store.states_before(event.event_id for event in room.events[120:])


async def test_gc_as_a_command_refuses(dsn: str, store: Store) -> None:
    room = await lying(store, LIARS["topological"])
    for rooms in ((), ("--room", room.room_id)):
        done = await room_storage_beside("gc", "--dsn", dsn, *rooms)
        assert done.returncode == 1
        assert "REINDEX INDEX CONCURRENTLY events_room_topological_idx" in done.stderr
