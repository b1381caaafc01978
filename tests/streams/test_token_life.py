"""Tokens that clients keep: they keep their meaning.

They survive a restart, deleted state groups, and purged events.
"""

import asyncio

import storage
from storage.ids import UserId
from storage.maintenance.state_group_gc import collect
from storage.streams import SyncToken, VectorPosition
from storage.testing import RoomBuilder

READER = UserId("@user1:s1.test")
QUIET = storage.Config(follow_ms=3_600_000)
PURGE = "DELETE FROM events WHERE type_nid = 8 AND stream_ordering <= 30"


async def test_tokens_outlive_restart_collection_and_purge(dsn: str) -> None:
    room = RoomBuilder("11", seed=6)
    room.start(READER)
    for number in range(60):
        (room.topic if number % 3 == 0 else room.message)(READER, str(number))
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as store:
        await store.append(room.pdus)
        first = await store.sync(READER, timeline_limit=5)
        since, place = first.next_batch, first.join[room.room_id].timeline.prev_batch
        page = await store.messages(room.room_id, READER, from_=place, limit=20)
        news = [room.message(READER, "news"), room.topic(READER, "news")]
        await store.append([event.pdu for event in news])
        expected = await store.sync(READER, since=since)
        assert page.end is not None
    async with storage.open(
        dsn, server_name="s1.test", instance_name="second", config=QUIET
    ) as store:
        assert await store.sync(READER, since=since) == expected
        assert (
            await store.messages(room.room_id, READER, from_=place, limit=20)
        ).chunk == page.chunk
        await collect(store.database, room.room_id)
        assert await store.sync(READER, since=since) == expected
        async with store.database.connection() as conn:
            await conn.execute(PURGE)
        assert await store.sync(READER, since=since) == expected
        assert (
            await store.messages(room.room_id, READER, from_=place, limit=20)
        ).chunk == page.chunk
        assert (await store.sync(READER, since=expected.next_batch)).is_empty
        rest = await store.messages(room.room_id, READER, from_=page.end, limit=100)
        assert 0 < len(rest.chunk) < len(room.events) - 5 - 20


async def test_a_token_from_before_an_upgrade_brings_what_the_new_stream_has(dsn: str) -> None:
    """The token names fewer streams than there are now.

    The others count as unread, and nothing of those it names comes again.
    """
    room = RoomBuilder("11", seed=6)
    room.start(READER)
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as store:
        await store.append(room.pdus)
        await store.to_device.send({READER: {"device": {"n": 1}}})
        now = SyncToken.parse((await store.sync(READER)).next_batch, store.deployment_id)
        before = SyncToken.of(
            {name: position for name, position in now.streams if name != "to_device"}
        ).print(store.deployment_id)
        assert store.positions_of(before).get("to_device", VectorPosition()).min == 0
        answer = await store.sync(READER, since=before)
        assert not answer.join
        assert SyncToken.parse(answer.next_batch, store.deployment_id) == now
        async with asyncio.timeout(30):
            waited = await store.sync(READER, since=before, timeout_ms=60_000)
        assert waited.next_batch == answer.next_batch, "what is unread ends the wait at once"
