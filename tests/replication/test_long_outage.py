"""A database that is away for 20 s, or `STORAGE_OUTAGE_S`, while appends, messages and syncs run.

Postgres is killed. There are four stores, and only the last polls the tables: the first writes, one
follows it over TCP, one over Redis, the last by polling.

Just before, the test cuts the TCP connection and kills Redis. When they are back, the others see
that they have missed facts, and there is no database to read them from. Each call soon raises
that the database is away. Afterwards all stores recover by themselves: each event is published
once and is in each sync once.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

import storage
from storage import CommitUnknown, Config, DatabaseUnavailable, Store
from storage.ids import EventId, UserId
from storage.replication import Client, ReplicationPeer, Server
from storage.replication.redis_transport import RedisTransport
from storage.testing import RoomBuilder
from tests.mortal import Mortal, mortal_postgres
from tests.replication.processes import Seen
from tests.replication.proxies import Proxy
from tests.replication.redis_server import RedisServer

OUTAGE_S = float(os.environ.get("STORAGE_OUTAGE_S", "20"))
ALICE = UserId("@alice:s1.test")
AWAY = (DatabaseUnavailable, CommitUnknown)

PATIENCE_MS = 1_000
CONFIG = Config(
    pool_acquire_timeout_ms=PATIENCE_MS,
    connect_timeout_ms=PATIENCE_MS,
    follow_ms=3_600_000,
)
LOOKING = replace(CONFIG, follow_ms=100)


@pytest.fixture
def mortal() -> Iterator[Mortal]:
    with mortal_postgres() as server:
        yield server


class Tried:
    """Calls that may find the database away: how often, and the longest time until they raised."""

    def __init__(self) -> None:
        self.away = 0
        self.slowest_s = 0.0

    async def again(self, call: Awaitable[object]) -> bool:
        """Whether it was done."""
        begun = time.monotonic()
        try:
            await call
        except AWAY:
            self.away += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
            await asyncio.sleep(0.2)
            return False
        return True


class Appender:
    """Appends one message after the other, each until it is stored."""

    def __init__(self, store: Store, room: RoomBuilder) -> None:
        self.store, self.room = store, room
        self.tried = Tried()
        self.stored: list[EventId] = []
        self._one_more = asyncio.Event()

    async def run(self, until: asyncio.Event) -> None:
        while not until.is_set():
            said = self.room.message(ALICE, f"number {len(self.stored)}")
            while not await self.tried.again(self._append(said.pdu)):
                pass
            self.stored.append(said.event_id)
            self._one_more.set()
            await asyncio.sleep(0.05)

    async def stores(self, more: int) -> None:
        """Wait until there are so many more."""
        wanted = len(self.stored) + more
        while len(self.stored) < wanted:
            self._one_more.clear()
            await self._one_more.wait()

    async def _append(self, pdu: bytes) -> None:
        [result] = await self.store.append([pdu])
        assert result.outcome in {"stored", "duplicate"}


class Messenger:
    """Sends one numbered message to a device after the other.

    Whether one was sent whose `CommitUnknown` it got, it cannot know.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sent: set[int] = set()
        self.failed: set[int] = set()

    async def run(self, until: asyncio.Event) -> None:
        number = 0
        while not until.is_set():
            number += 1
            try:
                await self.store.to_device.send({ALICE: {"device": {"n": number}}})
                self.sent.add(number)
            except CommitUnknown:
                pass
            except DatabaseUnavailable:
                self.failed.add(number)
            await asyncio.sleep(0.1)

    async def check(self) -> None:
        numbers = [
            json.loads(message.content)["n"]
            for message in await self.store.to_device.inbox(ALICE, "device", limit=100_000)
        ]
        assert numbers == sorted(set(numbers)), "sent twice, or out of order"
        assert self.sent <= set(numbers)
        assert self.failed.isdisjoint(numbers)
        assert self.failed


class Syncer:
    """A client that syncs all the time, with a timeout, from where it was."""

    def __init__(self, store: Store, since: str) -> None:
        self.store, self.since = store, since
        self.tried = Tried()
        self.seen: list[EventId] = []

    async def run(self, upto: asyncio.Future[EventId]) -> None:
        """Until it has seen this event."""
        while not (upto.done() and upto.result() in self.seen):
            await self.tried.again(self._sync())

    async def _sync(self) -> None:
        answer = await self.store.sync(
            ALICE, since=self.since, timeline_limit=1_000, timeout_ms=2_000
        )
        for joined in answer.join.values():
            assert not joined.timeline.limited
            self.seen += [event.event_id for event in joined.timeline.events]
        self.since = answer.next_batch


class Processes:
    """The stores, and how they hear of each other."""

    def __init__(self, stack: AsyncExitStack, dsn: str) -> None:
        self._stack, self._dsn = stack, dsn

    async def open(self) -> None:
        self.main = await self._store("main", CONFIG)
        self.tcp = await self._store("tcp", CONFIG)
        self.over_redis = await self._store("redis", CONFIG)
        self.looking = await self._store("looking", LOOKING)
        self.all = [self.main, self.tcp, self.over_redis, self.looking]
        self.seen = [Seen(store.streams) for store in self.all]
        self.redis = await self._stack.enter_async_context(RedisServer())
        self.server = await self._stack.enter_async_context(await Server(self.main).serve())
        self.proxy = await self._stack.enter_async_context(Proxy(self.server.port))
        self.client = await self._stack.enter_async_context(
            Client(self.tcp, "127.0.0.1", self.proxy.port)
        )
        self.transports = [RedisTransport(self.redis.url, "s1.test") for _ in range(2)]
        await self._stack.enter_async_context(
            ReplicationPeer(self.main, self.transports[0], follows=False)
        )
        await self._stack.enter_async_context(ReplicationPeer(self.over_redis, self.transports[1]))
        self.client.user_syncs(ALICE, "DEVICE", syncing=True)
        await self.connected()

    async def connected(self) -> None:
        await self.client.connected()
        for transport in self.transports:
            await transport.connected()

    async def _store(self, name: str, config: Config) -> Store:
        return await self._stack.enter_async_context(
            storage.open(self._dsn, server_name="s1.test", instance_name=name, config=config)
        )

    async def lose_each_other(self) -> None:
        """Every connection among them breaks, and none can be made."""
        self.proxy.open = False
        self.proxy.cut()
        await self.redis.stop()

    async def find_each_other(self) -> None:
        """They come back by themselves; none of it takes a database."""
        self.proxy.open = True
        await self.redis.start()
        await self.connected()


@pytest.fixture
async def processes(mortal: Mortal) -> AsyncIterator[Processes]:
    dsn = await asyncio.to_thread(mortal.start)
    async with storage.open(dsn, server_name="s1.test", instance_name="first", migrate=True):
        pass
    async with AsyncExitStack() as stack:
        opened = Processes(stack, dsn)
        await opened.open()
        yield opened


async def outage(mortal: Mortal, processes: Processes, appender: Appender) -> None:
    """Before the outage, store some events that the others do not receive.

    During it they learn that they have missed some.
    """
    await processes.lose_each_other()
    await appender.stores(5)
    mortal.kill()
    await asyncio.sleep(OUTAGE_S / 2)
    await processes.find_each_other()
    assert processes.server.syncing.is_syncing(ALICE), "told again, though there is no database"
    connections = processes.proxy.connections
    await asyncio.sleep(OUTAGE_S / 2)
    assert processes.proxy.connections == connections, (
        "nobody has anything to say for longer than anybody may be silent, but for PING"
    )
    assert processes.server.syncing.is_syncing(ALICE)
    behind = [
        store.streams["events"].positions()["main"]
        for store in (processes.tcp, processes.over_redis)
    ]
    assert max(behind) < processes.main.streams["events"].positions()["main"]
    await asyncio.to_thread(mortal.start)


@pytest.mark.slow
@pytest.mark.timeout(OUTAGE_S + 120)
async def test_a_database_that_is_away(mortal: Mortal, processes: Processes) -> None:
    room = RoomBuilder("11")
    room.start(ALICE)
    main = processes.main
    await main.append(room.pdus)
    for seen in processes.seen:
        await seen.reached("main", main.streams["events"].positions()["main"], "events")
    since = (await main.sync(ALICE)).next_batch
    appender, messenger = Appender(main, room), Messenger(main)
    syncers = [Syncer(store, since) for store in processes.all]
    enough, last = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        writing = [tasks.create_task(one.run(enough)) for one in (appender, messenger)]
        for syncer in syncers:
            tasks.create_task(syncer.run(last))
        await appender.stores(20)
        await outage(mortal, processes, appender)
        await appender.stores(20)
        enough.set()
        await asyncio.wait(writing)
        last.set_result(appender.stored[-1])
    for syncer in syncers:
        assert syncer.seen == appender.stored, f"by {syncer.store.instance_name}"
        assert syncer.tried.away > 0
    told = appender.stored
    for seen in processes.seen:
        await seen.reached("main", main.streams["events"].positions()["main"], "events")
        facts = [fact.row[0] for fact in seen.facts["events", "main"]]
        assert [event_id for event_id in facts if event_id in set(told)] == told, (
            "each once, in order"
        )
    await messenger.check()
    assert appender.tried.away > OUTAGE_S / 2
    slowest = max(one.slowest_s for one in (appender.tried, *(syncer.tried for syncer in syncers)))
    assert slowest < 3 * PATIENCE_MS / 1000, f"{slowest} s until it was said"
