"""A rejected event may cite events of another room; verification knows that they may be purged."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.maintenance.purge import purge_room
from storage.rebuild import rebuild
from storage.testing import RoomBuilder
from tests.maintenance.rooms import SERVER, findings


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


@pytest.mark.parametrize("version", ["1", "11", "12"])
@pytest.mark.parametrize("kind", ["accepted", "rejected", "cited last"])
async def test_of_another_room(store: Store, version: str, kind: str) -> None:
    other, room = (RoomBuilder(version, seed=seed, checked=False) for seed in (1, 2))
    for one in (other, room):
        one.start(one.user(1), join_rule="invite")
    refused = other.fork(1)[0].join(other.user(3))
    foreign = refused if kind == "rejected" else other.events[1]
    own = room.events[2]
    auth = [own, own, foreign] if kind == "cited last" else [foreign, own]
    bad = room.fork(1)[0].topic(room.user(1), "x", auth=[one.event_id for one in auth])
    await store.append(other.pdus, room_version=version)
    results = await store.append(room.pdus, room_version=version)
    assert [one.event_id for one in results if one.outcome == "rejected"] == [bad.event_id]
    assert await findings(store) == []
    await purge_room(store.database, other.room_id, server_name=SERVER, force=True)
    assert await findings(store) == []
    await rebuild(store.database, room.room_id, server_name=SERVER)
    assert await findings(store) == []
    kept = await store.event(bad.event_id)
    assert kept is not None
    assert kept.rejected == next(one.reason for one in results if one.outcome == "rejected")
    [after] = await store.append([room.message(room.user(1), "after").pdu])
    assert after.outcome == "stored"
