"""Two stores on one database, one of which hears of the other's events by replication."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import storage
from storage import Store
from storage.replication import Client, Handlers, Hub, ReplicationPeer, Server
from storage.replication.commands import RemoteServerUp
from storage.replication.redis_transport import RedisTransport
from storage.testing import RoomBuilder
from tests.replication.processes import Seen
from tests.replication.redis_server import RedisServer

EVENTS = 60


@pytest.mark.parametrize("follow_ms", [1, 60_000])
async def test_events_of_one_store_reach_the_other_once_and_in_order(
    dsn: str, follow_ms: int
) -> None:
    """Beside replication each store also looks into the table, now and then, or all the time."""
    room = RoomBuilder("11")
    alice = "@alice:s1.test"
    room.start(alice)
    for number in range(EVENTS):
        room.message(alice, f"message {number}")
    config = storage.Config(follow_ms=follow_ms)
    async with (
        storage.open(dsn, server_name="s1.test", instance_name="main", config=config) as main,
        storage.open(dsn, server_name="s1.test", instance_name="worker", config=config) as worker,
        await Server(main).serve() as server,
        Client(worker, "127.0.0.1", server.port) as client,
    ):
        seen = Seen(worker.streams)
        await client.connected()
        results = [result for pdu in room.pdus for result in await main.append([pdu])]
        last = results[-1].stream_ordering
        assert last is not None
        await seen.reached("main", last, "events")
        facts = seen.facts["events", "main"]
        assert [fact.row[0] for fact in facts] == [result.event_id for result in results]
        assert facts == await worker.streams["events"].rows(0, last, 1_000, instance_name="main")


@asynccontextmanager
async def replicating(kind: str, main: Store, worker: Store) -> AsyncIterator[None]:
    """Until the end of the block the worker hears of what the main process writes."""
    if kind == "TCP":
        async with await Server(main).serve() as server, Client(worker, "127.0.0.1", server.port):
            yield
    elif kind == "Redis":
        async with RedisServer() as redis:
            transports = [RedisTransport(redis.url, "s1.test") for _ in range(2)]
            async with ReplicationPeer(main, transports[0]), ReplicationPeer(worker, transports[1]):
                yield
    else:
        hub = Hub()
        async with (
            ReplicationPeer(main, hub.join("main")),
            ReplicationPeer(worker, hub.join("worker")),
        ):
            yield


@pytest.mark.parametrize("kind", ["in process", "TCP", "Redis"])
async def test_a_sync_on_one_store_is_woken_by_an_append_on_another(dsn: str, kind: str) -> None:
    """Nobody looks into the table here: what wakes is the row that comes over the wire."""
    room = RoomBuilder("11")
    alice = "@alice:s1.test"
    room.start(alice)
    config = storage.Config(follow_ms=3_600_000)
    async with (
        storage.open(dsn, server_name="s1.test", instance_name="main", config=config) as main,
        storage.open(dsn, server_name="s1.test", instance_name="worker", config=config) as worker,
        replicating(kind, main, worker),
    ):
        await main.append(room.pdus)
        since = (await worker.sync(alice)).next_batch
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(worker.sync(alice, since=since, timeout_ms=60_000))
            said = room.message(alice, "wake up")
            tasks.create_task(main.append([said.pdu]))
        [event] = asking.result().join[room.room_id].timeline.events
        assert event.event_id == said.event_id


async def test_a_server_that_is_up_again_ends_the_pauses_of_gaps(dsn: str) -> None:
    room = RoomBuilder("11", sign=False)
    alice = "@alice:s1.test"
    room.start(alice)
    missing, last = room.message(alice), room.message(alice)
    async with (
        storage.open(dsn, server_name="s1.test") as store,
        await Server(store).serve() as server,
        Client(Handlers(), "127.0.0.1", server.port) as client,
    ):
        await store.append([event.pdu for event in room.events if event not in (missing, last)])
        await store.append(
            [last.pdu], state_before={last.event_id: list(last.state_before.values())}
        )
        await store.gap_failed(
            room.room_id, [missing.event_id], "timeout", server_names=["s2.test"]
        )
        assert [gap.failures for gap in await store.gaps(room.room_id)] == [1]
        heard = asyncio.Event()
        server.handlers.on(RemoteServerUp, lambda _: heard.set())
        await client.connected()
        client.publish(RemoteServerUp("s2.test"))
        await heard.wait()
    async with storage.open(
        dsn, server_name="s1.test"
    ) as store:  # what was begun is ended when the server closes
        [gap] = await store.gaps(room.room_id)
        assert (gap.failures, gap.retry_after_ms, gap.reason) == (0, 0, "timeout")
