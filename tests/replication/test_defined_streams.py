"""Facts of defined streams travel over each transport, also where others know other streams."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import storage
from storage import Store
from storage.replication import Client, Handlers, ReplicationPeer, Server
from storage.replication.commands import Rdata
from storage.replication.redis_transport import RedisTransport
from storage.streams.position_poller import follow_once
from tests.queries.rooms import LOCAL, deliver, new_room
from tests.replication.processes import Seen
from tests.replication.redis_server import RedisServer
from tests.replication.test_stores import replicating

KINDS = ["in process", "TCP", "Redis"]
ROOM = "!room:s1.test"
SELDOM = storage.Config(follow_ms=3_600_000)
LARGE = "x" * 40_000  # more than a line


@asynccontextmanager
async def two_stores(dsn: str, config: storage.Config = SELDOM) -> AsyncIterator[list[Store]]:
    async with (
        storage.open(dsn, server_name="s1.test", instance_name="main", config=config) as main,
        storage.open(dsn, server_name="s1.test", instance_name="worker", config=config) as worker,
    ):
        yield [main, worker]


@pytest.mark.parametrize("kind", KINDS)
async def test_facts_arrive_once_and_in_order(dsn: str, kind: str) -> None:
    """Nobody polls: they come over the wire, also one that does not fit a line."""
    async with two_stores(dsn) as (main, worker):
        typing = await main.define_stream("typing")
        await worker.define_stream("typing")
        await follow_once(main.database, main.streams)
        seen = Seen(worker.streams)
        async with replicating(kind, main, worker):
            values: list[Any] = [0, LARGE, *range(2, 40)]
            ids = [await typing.publish(ROOM, value, wakes=[LOCAL]) for value in values]
            await seen.reached("main", ids[-1], "typing")
        facts = seen.facts["typing", "main"]
        assert [fact.stream_id for fact in facts] == ids
        assert [fact.row for fact in facts] == [[ROOM, value, [LOCAL]] for value in values]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sync_on_another_store_wakes(dsn: str, kind: str) -> None:
    async with two_stores(dsn) as (main, worker), replicating(kind, main, worker):
        await deliver(main, new_room(members=[LOCAL]))
        typing = main.define_stream("typing")
        worker.define_stream("typing")
        since = (await worker.sync(LOCAL)).next_batch
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(worker.sync(LOCAL, since=since, timeout_ms=60_000))
            position = await typing.publish(ROOM, 1, wakes=[LOCAL])
        reached = worker.positions_of(asking.result().next_batch)["typing"]
        assert reached.covers("main", position)


@pytest.mark.parametrize("kind", KINDS)
async def test_processes_that_define_different_streams(dsn: str, kind: str) -> None:
    """No link fails. A stream that the other one does not know yet is followed once it polls."""
    async with two_stores(dsn) as (main, worker), replicating(kind, main, worker):
        await deliver(main, new_room(members=[LOCAL]))
        presence = await worker.define_stream("presence")
        typing = main.define_stream("typing")
        seen = Seen(worker.streams)
        first = await typing.publish(ROOM, 1, wakes=[LOCAL])
        await presence.publish(LOCAL, 1, wakes=[LOCAL])
        assert "typing" not in worker.streams
        account_data = await main.account_data.set(storage.UserId(LOCAL), "m.tag", {})
        await seen.reached("main", account_data, "account_data")  # the link works
        await follow_once(worker.database, worker.streams)
        assert worker.streams["typing"].positions()["main"] >= first
        last = await typing.publish(ROOM, 2)
        await seen.reached("main", last, "typing")
        assert [fact.row[1] for fact in seen.facts["typing", "main"]] == [2]
        assert "typing" not in worker.positions_of((await worker.sync(LOCAL)).next_batch)


async def test_a_process_that_only_relays_sends_rows_of_the_stream(dsn: str) -> None:
    """As `room-storage serve`: it defines nothing, and its clients get lines with the name."""
    lines: list[Rdata] = []
    arrived = asyncio.Event()

    def note(command: Rdata) -> None:
        if command.stream_name == "typing":
            lines.append(command)
            arrived.set()

    async with two_stores(dsn, storage.Config(follow_ms=20)) as (relay, writer):
        handlers = Handlers()
        handlers.on(Rdata, note)
        async with (
            await Server(relay).serve() as server,
            Client(handlers, "127.0.0.1", server.port) as client,
        ):
            await client.connected()
            typing = writer.define_stream("typing")
            async with asyncio.timeout(30):
                while "typing" not in relay.streams:
                    await typing.publish(ROOM, "before")
                    await asyncio.sleep(0.01)
                last = await typing.publish(ROOM, "after", wakes=[LOCAL])
                while not lines or lines[-1].token != last:
                    arrived.clear()
                    await arrived.wait()
        assert str(lines[-1]) == f'RDATA typing worker {last} ["{ROOM}","after",["{LOCAL}"]]'


WRITER = """
import asyncio, sys, storage
from tests.queries.rooms import LOCAL

async def main(dsn, name):
    config = storage.Config(follow_ms=50, pool_size_max=2)
    async with storage.open(dsn, server_name="s1.test", instance_name=name, config=config) as store:
        stream = store.define_stream("typing")
        number = 0
        while True:
            await stream.publish("!room:s1.test", number, wakes=[LOCAL])
            print(number, flush=True)
            number += 1

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_writer_leaves_no_gap(dsn: str) -> None:
    """Its facts are followed once each, and its position holds nobody up."""
    config = storage.Config(follow_ms=20)
    async with storage.open(dsn, server_name="s1.test", config=config) as store:
        typing = await store.define_stream("typing")
        seen = Seen(store.streams)
        done: list[int] = []
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WRITER, dsn, "killed", stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            async with asyncio.timeout(60):
                done += [int(await process.stdout.readline()) for _ in range(20)]
            process.kill()
            await process.wait()
        last = await typing.publish(ROOM, "after")
        async with asyncio.timeout(30):
            while store.streams["typing"].linear() < last:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        facts = [fact for fact in await typing.rows() if fact.instance_name == "killed"]
        assert seen.facts["typing", "killed"] == facts
        assert len(facts) >= len(done) == 40
        assert [fact.value for fact in facts if fact.value <= 19] == [*range(20), *range(20)]


async def test_a_redis_that_restarts_loses_nothing(dsn: str) -> None:
    async with two_stores(dsn) as (main, worker), RedisServer() as redis:
        typing = await main.define_stream("typing")
        await worker.define_stream("typing")
        await follow_once(main.database, main.streams)
        seen = Seen(worker.streams)
        transports = [RedisTransport(redis.url, "s1.test") for _ in range(2)]
        async with ReplicationPeer(main, transports[0]), ReplicationPeer(worker, transports[1]):
            ids = [await typing.publish(ROOM, number) for number in range(5)]
            await redis.stop()
            ids += [await typing.publish(ROOM, number) for number in range(5, 10)]
            await redis.start()
            for transport in transports:
                await transport.connected()
            ids += [await typing.publish(ROOM, number) for number in range(10, 15)]
            await seen.reached("main", ids[-1], "typing")
        assert seen.ids("main", "typing") == ids
