"""Damage of the changes of the current state is found, and clients get what was lost."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

import storage
from storage import Store
from storage.maintenance.purge import purge_history
from storage.rebuild import rebuild
from storage.testing import RoomBuilder
from tests.maintenance.rooms import SERVER, findings

LAST = (
    "(SELECT event_nid FROM state_deltas WHERE prev_event_nid IS NOT NULL "
    "ORDER BY stream_ordering DESC LIMIT 1)"
)
ONE_MEMBER = (
    "(SELECT event_nid FROM state_deltas d JOIN events e USING (event_nid) "
    "WHERE e.membership = 5 ORDER BY d.stream_ordering DESC LIMIT 1)"
)
ONE_TOPIC = (
    "(SELECT event_nid FROM state_deltas d JOIN events e USING (event_nid) "
    "WHERE e.type_nid = 10 ORDER BY d.stream_ordering LIMIT 1)"
)
DAMAGES = {
    "the last of a key lost": f"DELETE FROM state_deltas WHERE event_nid = {LAST}",
    "the first of a key lost": f"DELETE FROM state_deltas WHERE event_nid = {ONE_TOPIC}",
    "all of a key lost": "DELETE FROM state_deltas WHERE state_key_nid = "
    f"(SELECT state_key_nid FROM state_deltas WHERE event_nid = {ONE_MEMBER})",
    "another event": f"UPDATE state_deltas SET event_nid = {ONE_MEMBER} WHERE event_nid = {LAST}",
    "an unknown event": f"UPDATE state_deltas SET event_nid = 99999 WHERE event_nid = {LAST}",
    "removed": f"UPDATE state_deltas SET event_nid = NULL WHERE event_nid = {LAST}",
    "from nothing": f"UPDATE state_deltas SET prev_event_nid = NULL WHERE event_nid = {LAST}",
    "from another event": f"UPDATE state_deltas SET prev_event_nid = {ONE_TOPIC} "
    f"WHERE event_nid = {ONE_MEMBER}",
    "at another event's position": "UPDATE state_deltas SET stream_ordering = stream_ordering + 1 "
    f"WHERE event_nid = {LAST}",
    "at no position": f"UPDATE state_deltas SET stream_ordering = 99999 WHERE event_nid = {LAST}",
    "of another key": f"UPDATE state_deltas SET state_key_nid = 3 WHERE event_nid = {LAST}",
    "of another writer": f"UPDATE state_deltas SET writer_nid = 77 WHERE event_nid = {LAST}",
    "set and removed, both lost": "DELETE FROM state_deltas WHERE stream_ordering >= "
    f"(SELECT stream_ordering FROM state_deltas WHERE event_nid = {ONE_TOPIC}) "
    "AND state_key_nid = 10",
}


def a_room() -> RoomBuilder:
    room = RoomBuilder("11", sign=False)
    room.start(room.user(1))
    room.join(room.user(2))
    for number in range(4):
        room.topic(room.user(1), f"topic {number}")
        room.message(room.user(2))
        room.message(room.user(1))
    room.join(room.user(3))
    room.leave(room.user(2))
    room.message(room.user(1))
    return room


@pytest.fixture(scope="module")
def room() -> RoomBuilder:
    return a_room()


@pytest.fixture
async def store(dsn: str, room: RoomBuilder) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        await opened.append(room.pdus)
        yield opened


async def changed(dsn: str, sql: str) -> None:
    driver = await asyncpg.connect(dsn)
    assert (await driver.execute(sql)).rpartition(" ")[2] != "0", "nothing to damage"
    await driver.close()


@pytest.mark.parametrize("name", DAMAGES)
async def test_damage_is_found_and_mended(
    dsn: str, store: Store, room: RoomBuilder, name: str
) -> None:
    assert await findings(store) == []
    await changed(dsn, DAMAGES[name])
    found = await findings(store)
    assert "state_deltas" in {finding.check for finding in found}, "\n".join(map(str, found))
    assert {finding.check for finding in found} <= {"state_deltas", "memberships"}
    await rebuild(store.database, room.room_id, server_name=SERVER)
    after = await findings(store)
    assert after == [], "\n".join(map(str, after))
    assert await store.current_state(room.room_id) == dict(room.state)


async def test_clients_get_a_leave_whose_change_was_lost(
    dsn: str, store: Store, room: RoomBuilder
) -> None:
    """A sync from before the damage, and one from after it."""
    reader = room.user(1)
    await changed(dsn, f"DELETE FROM state_deltas WHERE event_nid = {LAST}")
    before = (await store.sync(reader)).next_batch
    await rebuild(store.database, room.room_id, server_name=SERVER)
    await storage.streams.position_poller.follow_once(store.database, store.streams)
    after = await store.sync(reader, since=before)
    assert room.events[-2].event_id in {event.event_id for event in after.join[room.room_id].state}


async def test_a_purged_room_has_chains_that_begin_late(
    dsn: str, store: Store, room: RoomBuilder
) -> None:
    """Their beginnings are no damage. What is damaged behind them is found."""
    await purge_history(
        store.database,
        room.room_id,
        server_name=SERVER,
        before_event_id=room.events[-6].event_id,
        local=True,
    )
    assert await findings(store) == []
    await changed(dsn, f"DELETE FROM state_deltas WHERE event_nid = {LAST}")
    assert {finding.check for finding in await findings(store)} == {"state_deltas"}
    await rebuild(store.database, room.room_id, server_name=SERVER)
    assert await findings(store) == []
