"""A client whose connection breaks, stalls, or missed something."""

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from storage.config import Config
from storage.database.connection import Database
from storage.replication import Client, Server
from storage.replication.follower import Follower
from storage.streams.feed import StreamRow
from tests.replication.processes import SERVER_NAME, Process, limit
from tests.replication.proxies import Proxy, through, unix_socket_of
from tests.replication.sessions import FakeServer, check_complete, connected


async def missed_while_away(main: Process, worker: Process) -> None:
    async with (
        await Server(main).serve() as server,
        Proxy(server.port) as proxy,
        connected(worker, proxy.port) as client,
    ):
        await main.write(2)
        await worker.seen.reached("main", main.position)
        proxy.open = False
        proxy.cut()
        await main.write(20)
        proxy.open = True
        await client.connected()
        await main.write(2)
        await worker.seen.reached("main", main.position)


async def test_what_was_missed_while_away_is_fetched(main: Process, worker: Process) -> None:
    await missed_while_away(main, worker)
    await check_complete(worker, main)


async def test_a_reader_that_does_not_fill_holes_loses_facts(
    main: Process, worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def believe(self: Follower, track: Any, goal: int) -> None:
        track.live = True
        self._apply(track, goal, [])

    monkeypatch.setattr(Follower, "_fetch", believe)
    await missed_while_away(main, worker)
    with pytest.raises(AssertionError):
        await check_complete(worker, main)


async def test_a_client_that_could_not_read_for_long_gets_everything_in_the_end(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has hung up on it; what did not fit into the bound comes from the table."""
    limit(
        monkeypatch,
        buffer_bytes_max=1_000_000,
        page_rows_max=10_000,
        close_ms=100,
        timeout_ms=600_000,
    )
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(await Database.open(dsn))
        main, worker = [await Process.start(database, name) for name in ("main", "worker")]
        server = await stack.enter_async_context(await Server(main).serve())
        proxy = await stack.enter_async_context(Proxy(server.port))
        await stack.enter_async_context(connected(worker, proxy.port))
        await main.write()
        await worker.seen.reached("main", main.position)
        [connection] = server.connections
        proxy.flows.clear()
        while connection.refused is None:
            await main.write(10_000)
        assert connection.refused.startswith("too slow: ")
        await connection.ended.wait()
        proxy.flows.set()
        await check_complete(worker, main)
        assert proxy.connections > 1


async def test_a_connection_lost_in_the_middle_of_a_batch(main: Process, worker: Process) -> None:
    ids = await main.write(3)
    async with FakeServer() as fake, fake.client(worker):
        session = await fake.session()
        session.say(
            f"SERVER {SERVER_NAME}",
            f"POSITION caches main {ids[0] - 1} {ids[0] - 1}",
            'RDATA caches main batch ["torn"]',
        )
        session.say("POSITION caches other 0 1")
        await worker.seen.reached("other", 1)
        session.writer.transport.abort()
        again = await fake.session()
        again.say(
            f"SERVER {SERVER_NAME}",
            'RDATA caches main batch ["the end of another"]',
            f'RDATA caches main {ids[0]} ["it"]',
        )
        await worker.seen.reached("main", ids[0])
        again.say(f"POSITION caches main {ids[2]} {ids[2]}")
        await check_complete(worker, main)


async def test_one_that_fetches_holds_up_nobody_else(
    main: Process, worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await Process.start(main.database, "other")
    await main.write(5)
    rows, go_on = worker.streams["caches"].rows, asyncio.Event()

    async def late(*args: int, instance_name: str) -> list[StreamRow]:
        if instance_name == "main":
            await go_on.wait()
        return await rows(*args, instance_name=instance_name)

    monkeypatch.setattr(worker.streams["caches"], "rows", late)
    async with (
        await Server(main).serve() as server,
        await Server(other).serve() as other_server,
        connected(worker, server.port),
        connected(worker, other_server.port),
    ):
        await other.write(2)
        await main.write(5)
        await check_complete(worker, other)
        assert worker.seen.ids("main") == []
        go_on.set()
        await check_complete(worker, main)


async def test_a_database_that_goes_away_while_a_hole_is_filled(main: Process, dsn: str) -> None:
    config = Config(pool_acquire_timeout_ms=2_000, connect_timeout_ms=2_000)
    async with (
        Proxy(unix_socket_of(dsn)) as postgres,
        await Database.open(through(dsn, postgres.port), config=config) as database,
        await Server(main).serve() as server,
    ):
        worker = await Process.start(database, "worker")
        await main.write(30)
        postgres.open = False
        postgres.cut()
        before = postgres.connections
        async with connected(worker, server.port):
            async with asyncio.timeout(30):
                while postgres.connections < before + 3:
                    await main.write()
            assert worker.seen.ids("main") == []
            postgres.open = True
            await check_complete(worker, main)


async def test_connections_that_break_anywhere(dsn: str) -> None:
    """Three writers that also give up ids, with a server each.

    Connections break after a random number of bytes.
    """
    chance = random.Random(7)
    async with await Database.open(dsn) as database, AsyncExitStack() as stack:
        writers = [await Process.start(database, f"writer{number}") for number in range(3)]
        reader = await Process.start(database, "reader")
        proxies = []
        for writer in writers:
            server = await stack.enter_async_context(await Server(writer).serve())
            proxy = await stack.enter_async_context(Proxy(server.port))
            proxy.cut_after = lambda: chance.randint(1, 4_000)
            proxies.append(proxy)
            await stack.enter_async_context(Client(reader, "127.0.0.1", proxy.port))

        async def write(writer: Process) -> None:
            for _ in range(60):
                await writer.write(chance.randint(1, 5), abandon=chance.random() < 0.2)

        await asyncio.gather(*map(write, writers))
        for proxy in proxies:
            proxy.cut_after = None
        await check_complete(reader, *writers)
        assert min(proxy.connections for proxy in proxies) > 2
