"""An event that is stored twice is named and repaired, and does not stop the other checks."""

import asyncio

import asyncpg
import pytest

import storage
from storage import StorageCorrupt
from storage.maintenance.indexes import index_mismatches
from storage.rebuild import rebuild, repair_positions
from storage.testing import RoomBuilder
from tests.maintenance.rooms import SERVER, findings

SQL_COPY = """
CREATE TEMP TABLE twin ON COMMIT DROP AS SELECT * FROM events WHERE event_id = '{event_id}';
UPDATE twin SET event_nid = (SELECT max(event_nid) + 1 FROM events),
    stream_ordering = (SELECT max(stream_ordering) + 1 FROM events),
    prev_distance = prev_distance + (SELECT max(event_nid) + 1 FROM events) - event_nid,
    auth_distance_1 = auth_distance_1 + (SELECT max(event_nid) + 1 FROM events) - event_nid,
    auth_distance_2 = auth_distance_2 + (SELECT max(event_nid) + 1 FROM events) - event_nid,
    auth_distance_3 = auth_distance_3 + (SELECT max(event_nid) + 1 FROM events) - event_nid,
    auth_distance_4 = auth_distance_4 + (SELECT max(event_nid) + 1 FROM events) - event_nid;
INSERT INTO events SELECT * FROM twin;
"""

SQL_UNINDEXED = """
SET LOCAL session_replication_role = replica;
SET LOCAL enable_indexscan = off;
SET LOCAL enable_bitmapscan = off;
UPDATE pg_index SET indisready = false WHERE indexrelid = 'events_event_id_idx'::regclass;
CREATE TEMP TABLE again ON COMMIT DROP AS SELECT * FROM events WHERE event_id = '{event_id}';
DELETE FROM events WHERE event_id = '{event_id}';
INSERT INTO events SELECT * FROM again;
UPDATE pg_index SET indisready = true WHERE indexrelid = 'events_event_id_idx'::regclass;
"""


def small_room() -> RoomBuilder:
    room = RoomBuilder("11", sign=False)
    room.start(room.user(1))
    room.join(room.user(2))
    for _ in range(4):
        room.message(room.user(1))
    room.topic(room.user(1), "a topic")
    for _ in range(4):
        room.message(room.user(2))
    return room


async def copy(dsn: str, event_id: str) -> None:
    """Store an event a second time, under another nid and position."""
    driver = await asyncpg.connect(dsn)
    async with driver.transaction():
        await driver.execute(SQL_COPY.format(event_id=event_id))
    await driver.close()


async def changed(dsn: str, sql: str) -> None:
    driver = await asyncpg.connect(dsn)
    assert (await driver.execute(sql)).rpartition(" ")[2] != "0"
    await driver.close()


@pytest.mark.parametrize("kind", ["m.room.message", "m.room.topic", "m.room.member"])
async def test_a_doubled_event_is_named_and_repaired(dsn: str, kind: str) -> None:
    room = small_room()
    event = next(event for event in reversed(room.events) if event.type == kind)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
        await copy(dsn, event.event_id)
        await changed(dsn, "UPDATE rooms SET joined_count = 7")
        found = {finding.check: finding for finding in await findings(store)}
        assert found["doubled_events"].subject == (event.event_id,)
        assert found["doubled_events"].found.startswith("stored twice: nids ")
        assert "member_counts" in found, "the other checks go on"
        assert "indexes" not in found, "the index has each row"
        await rebuild(store.database, room.room_id, server_name=SERVER)
        await repair_positions(store.database)
        assert await findings(store) == []
        assert await store.current_state(room.room_id) == dict(room.state)
        assert list(await store.events([event.event_id])) == [event.event_id]


@pytest.mark.parametrize("kind", ["m.room.message", "m.room.topic"])
async def test_both_rows_have_children(dsn: str, kind: str) -> None:
    """They are taken out with what depends on them, and appended again."""
    room = small_room()
    event = next(event for event in room.events if event.type == kind)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
        await copy(dsn, event.event_id)
        await changed(
            dsn,
            "UPDATE events SET prev_events = (SELECT array_agg(event_nid) FROM events "
            f"WHERE event_id = '{event.event_id}'), prev_distance = NULL WHERE event_id = "
            f"'{room.events[-1].event_id}'",
        )
        assert "doubled_events" in {finding.check for finding in await findings(store)}
        await rebuild(store.database, room.room_id, server_name=SERVER)
        await repair_positions(store.database)
        assert [str(one) for one in await findings(store) if one.check == "doubled_events"] == []
        assert await findings(store) == []
        assert await store.current_state(room.room_id) == dict(room.state)


async def test_writers_store_no_event_twice(dsn: str) -> None:
    """Of several stores that append the same events at once, in any batches."""
    room = small_room()
    async with (
        storage.open(dsn, server_name=SERVER, instance_name="a") as one,
        storage.open(dsn, server_name=SERVER, instance_name="b") as other,
        storage.open(dsn, server_name=SERVER, instance_name="c") as third,
    ):
        await asyncio.gather(
            one.append(room.pdus),
            *(other.append([pdu], room_version="11") for pdu in room.pdus[:1]),
            third.append(room.pdus, origin="outlier", room_version="11"),
        )
        await asyncio.gather(
            one.append(room.pdus),
            *(other.append([pdu]) for pdu in room.pdus),
            third.append(room.pdus[5:]),
            third.append(room.pdus[3:], origin="backfill"),
        )
        assert "doubled_events" not in {finding.check for finding in await findings(one)}
        driver = await asyncpg.connect(dsn)
        twice = "SELECT event_id FROM events GROUP BY event_id HAVING count(*) > 1"
        assert await driver.fetch(twice) == []
        await driver.close()


async def test_only_an_index_that_misses_rows_lets_an_event_be_stored_twice(dsn: str) -> None:
    """After its REINDEX the index is right, and the doubled event is repaired."""
    room = small_room()
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
    driver = await asyncpg.connect(dsn)
    async with driver.transaction():
        await driver.execute(SQL_UNINDEXED.format(event_id=room.events[-3].event_id))
    await driver.close()
    async with storage.open(dsn, server_name=SERVER, instance_name="later") as store:
        assert [one.outcome for one in await store.append(room.pdus[-3:-2])] == ["stored"]
        assert {finding.check for finding in await findings(store)} == {"indexes"}
        with pytest.raises(StorageCorrupt, match="events_event_id_idx"):
            await rebuild(store.database, room.room_id, server_name=SERVER)
        async with store.database.connection() as conn:
            await conn.execute("REINDEX INDEX events_event_id_idx")
        assert await index_mismatches(store.database) == []
        assert "doubled_events" in {finding.check for finding in await findings(store)}
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert await findings(store) == []
