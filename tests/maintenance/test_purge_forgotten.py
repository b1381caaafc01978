"""What a writer remembers of purged rows: it never answers from them, told of the purge or not."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Config, Store
from storage.maintenance.purge import PurgeJob, purge_history, purge_room
from tests.maintenance.purging import PurgeKilled, chat
from tests.maintenance.rooms import SERVER, findings
from tests.small_limits import purges_in_batches

UNTOLD = Config(follow_ms=600_000, purge_pause_ms=0)
small_batches = purges_in_batches(10)
"""A process that hears of the facts of others after ten minutes."""


@pytest.fixture
def config() -> Config:
    return UNTOLD


@pytest.fixture
async def other(dsn: str, store: Store) -> AsyncIterator[Store]:
    """Another process, which has the same rows in its caches once it has seen the events."""
    async with storage.open(
        dsn, server_name=SERVER, instance_name="other", config=UNTOLD
    ) as opened_too:
        yield opened_too


async def outcomes(store: Store, pdus: list[bytes]) -> set[str]:
    return {result.outcome for result in await store.append(pdus)}


@pytest.mark.every_postgres
async def test_events_of_a_purged_room_are_stored_at_once(store: Store, other: Store) -> None:
    """In the process that purged, and then in another one that has not heard of the purge."""
    room = chat(20)
    for one in (store, other):
        for again in range(2):
            assert await outcomes(one, room.pdus) == {
                "stored" if one is store and not again else "duplicate"
            }
    await purge_room(store.database, room.room_id, server_name=SERVER, force=True)
    assert await outcomes(other, room.pdus[:5]) == {"stored"}
    assert await outcomes(store, room.pdus) == {"stored", "duplicate"}
    assert await outcomes(other, room.pdus) == {"duplicate"}
    await purge_room(store.database, room.room_id, server_name=SERVER, force=True)
    assert await outcomes(store, room.pdus) == {"stored"}
    assert await outcomes(other, room.pdus) == {"duplicate"}
    assert await findings(store) == []


async def test_events_that_a_killed_purge_has_deleted_are_no_duplicates(
    store: Store, other: Store
) -> None:
    """Between two batches the room is there, and some of its events are not."""
    room = chat(40)
    await store.append(room.pdus)
    left = len(room.events)

    async def kill(_: PurgeJob) -> None:
        raise PurgeKilled

    for _ in range(2):
        await outcomes(other, room.pdus)  # fills its caches
        with pytest.raises(PurgeKilled):
            await purge_room(
                store.database, room.room_id, server_name=SERVER, force=True, watcher=kill
            )
        found = [result.outcome for result in await other.append(room.pdus)]
        async with store.database.connection() as conn:
            now: int = await conn.fetchval("SELECT count(*) FROM events")
        assert found.count("duplicate") < left
        left = now
    await purge_room(store.database, room.room_id, server_name=SERVER, force=True)
    assert await outcomes(other, room.pdus) == {"stored"}


async def test_history_that_comes_back_at_once_is_no_duplicate(store: Store, other: Store) -> None:
    room = chat(40)
    for one in (store, other):
        await outcomes(one, room.pdus)
        await outcomes(one, room.pdus)
    await purge_history(
        store.database,
        room.room_id,
        server_name=SERVER,
        before_event_id=room.events[30].event_id,
        local=True,
    )
    given = {event.event_id: sorted(event.state_before.values()) for event in room.events[20:30]}
    found = await other.append(
        [event.pdu for event in room.events[20:30]], origin="backfill", state_before=given
    )
    assert {result.outcome for result in found} == {"stored"}


async def test_duplicates_cost_one_look_at_their_room(store: Store) -> None:
    """However many they are."""
    room = chat(20)
    for _ in range(2):
        await store.append(room.pdus)
    for pdus in (room.pdus, room.pdus[-1:]):
        before = store.measures.writer_statements
        assert await outcomes(store, pdus) == {"duplicate"}
        assert store.measures.writer_statements - before == 1
