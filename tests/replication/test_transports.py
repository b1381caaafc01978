"""What each transport must do so that nothing is lost over it: one suite for all three."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Any, Protocol

import pytest

from storage.database.connection import Database
from storage.errors import InputError, ProtocolError, StorageClosed
from storage.replication import Client, Handlers, Hub, ReplicationPeer, Server
from storage.replication.commands import (
    LINE_BYTES_MAX,
    CancelTask,
    Command,
    FederationAck,
    LockReleased,
    Name,
    NewActiveTask,
    Position,
    Rdata,
    RemoteServerUp,
    UserIp,
    UserSync,
)
from storage.replication.redis_transport import RedisTransport
from storage.replication.server import ServerTransport
from tests.replication.processes import SERVER_NAME, FailsOnce, Process, limit
from tests.replication.proxies import Proxy
from tests.replication.redis_server import RedisServer

BEYOND = 1_000_000
"""An id that no writer of a test reaches by itself."""


class Net(Protocol):
    """A transport under test."""

    async def main(self, process: Process) -> ReplicationPeer: ...

    async def worker(self, process: Process) -> ReplicationPeer: ...

    async def break_for(self, meanwhile: Callable[[], Any]) -> None:
        """Break every connection, and mend it when ``meanwhile`` is over."""


class InProcessNet:
    """Nothing ever breaks within a process, but that somebody refuses what came."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._hub = Hub()
        self._exchanges: list[ReplicationPeer] = []

    async def main(self, process: Process) -> ReplicationPeer:
        self._exchanges.append(
            await self._stack.enter_async_context(
                ReplicationPeer(process, self._hub.join(process.instance_name))
            )
        )
        return self._exchanges[-1]

    worker = main

    async def break_for(self, meanwhile: Callable[[], Any]) -> None:
        for exchange in self._exchanges[1:]:
            exchange.transport.links[0].refuse("broken")
        await meanwhile()


class TcpNet:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def main(self, process: Process) -> ReplicationPeer:
        server = await self._stack.enter_async_context(await Server(process).serve())
        self._proxy = await self._stack.enter_async_context(Proxy(server.port))
        return server.exchange

    async def worker(self, process: Process) -> ReplicationPeer:
        client = await self._stack.enter_async_context(
            Client(process, "127.0.0.1", self._proxy.port)
        )
        await client.connected()
        return client.exchange

    async def break_for(self, meanwhile: Callable[[], Any]) -> None:
        self._proxy.open = False
        self._proxy.cut()
        await meanwhile()
        self._proxy.open = True


class RedisNet:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.redis: RedisServer | None = None

    async def main(self, process: Process) -> ReplicationPeer:
        if self.redis is None:
            self.redis = await self._stack.enter_async_context(RedisServer())
        transport = RedisTransport(self.redis.url, SERVER_NAME)
        exchange = await self._stack.enter_async_context(ReplicationPeer(process, transport))
        async with asyncio.timeout(30):
            await transport.connected()
        return exchange

    worker = main

    async def break_for(self, meanwhile: Callable[[], Any]) -> None:
        assert self.redis is not None
        await self.redis.stop()
        await meanwhile()
        await self.redis.start()


NETS: dict[str, Callable[[AsyncExitStack], Net]] = {
    "in process": InProcessNet,
    "TCP": TcpNet,
    "Redis": RedisNet,
}


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Net]:
    async with AsyncExitStack() as stack:
        yield NETS[kind](stack)


@pytest.fixture(params=NETS)
async def net(request: pytest.FixtureRequest, main: Process, worker: Process) -> AsyncIterator[Net]:
    """Closed before the processes are."""
    async with opened(request.param) as one:
        yield one


@pytest.fixture
async def second(main: Process, worker: Process) -> Process:
    """Another process that reads."""
    return await Process.start(main.database, "second")


class Heard:
    """What one participant hears of some kinds of commands."""

    def __init__(self, exchange: ReplicationPeer, *kinds: type[Command]) -> None:
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        for kind in kinds:
            exchange.handlers.on(kind, self._commands.put_nowait)

    async def next(self) -> Command:
        async with asyncio.timeout(30):
            return await self._commands.get()

    @property
    def empty(self) -> bool:
        return self._commands.empty()


async def check_complete(reader: Process, *writers: Process) -> None:
    for writer in writers:
        await reader.seen.reached(writer.instance_name, writer.position)
        assert reader.seen.ids(writer.instance_name) == await writer.written()


# --------------------------------------------------------------------------------------------------
# facts


async def test_facts_reach_all_readers(
    net: Net, main: Process, worker: Process, second: Process
) -> None:
    await main.write(12)
    await net.main(main)
    await net.worker(worker)
    await main.write(2)
    await net.worker(second)
    for _ in range(10):
        await main.write(3)
        await main.write(abandon=True)
    await check_complete(worker, main)
    await check_complete(second, main)
    assert all(not advance.local for advance in worker.seen.advances)


async def test_facts_that_share_an_id_arrive_together(
    net: Net, main: Process, worker: Process
) -> None:
    await net.main(main)
    await net.worker(worker)
    [before] = await main.write()
    await worker.seen.reached("main", before)
    main.tell(before + 5, [["a"], ["b"], ["c"]])
    await worker.seen.reached("main", before + 5)
    assert [fact.row for fact in worker.seen.advances[-1].rows] == [["a"], ["b"], ["c"]]


async def test_a_new_writer_is_told_of_before_what_was_written_after_it_came(
    net: Net, main: Process, worker: Process
) -> None:
    await net.main(main)
    await net.worker(worker)
    [entered] = await main.write()
    await worker.seen.reached("main", entered)
    main.streams.advance("caches", "new", entered, (), local=False)
    [after] = (await main.write(2))[-1:]
    await worker.seen.reached("main", after)
    told = [advance for advance in worker.seen.advances if advance.current >= entered]
    assert [advance.instance_name for advance in told] == ["main", "new", "main"]
    assert worker.streams["caches"].positions()["new"] == entered
    assert worker.streams["caches"].linear() <= entered


async def test_what_was_written_while_nobody_could_hear_is_fetched(
    net: Net, main: Process, worker: Process, second: Process
) -> None:
    await net.main(main)
    for reader in (worker, second):
        await net.worker(reader)
    await main.write(3)
    await check_complete(worker, main)
    for _ in range(3):
        await net.break_for(lambda: main.write(20))
        await main.write(2)
    await check_complete(worker, main)
    await check_complete(second, main)


async def test_a_row_that_is_not_as_it_should_be_does_no_lasting_harm(
    net: Net, main: Process, worker: Process
) -> None:
    exchange = await net.main(main)
    await net.worker(worker)
    first = await main.write(3)
    await check_complete(worker, main)
    exchange.publish(Rdata("events", "main", first[-1] + 1, ["too short"]))
    await main.write(3)
    await check_complete(worker, main)
    assert worker.seen.ids("main", "events") == []


# --------------------------------------------------------------------------------------------------
# commands


async def test_what_a_worker_says_reaches_the_main_process_in_order(
    net: Net, main: Process, worker: Process
) -> None:
    exchange = await net.main(main)
    heard = Heard(exchange, UserSync, FederationAck, UserIp)
    speaker = await net.worker(worker)
    speaker.user_syncs("@a:b.c", "D", syncing=True, at_ms=1)
    speaker.publish(UserIp("@a:b.c", "tok", "::1", "curl", "D", 7))
    speaker.acknowledge(12)
    speaker.user_syncs("@a:b.c", "D", syncing=False, at_ms=2)
    said = [await heard.next() for _ in range(4)]
    assert said == [
        UserSync("worker", "@a:b.c", "D", True, 1),
        UserIp("@a:b.c", "tok", "::1", "curl", "D", 7),
        FederationAck("worker", 12),
        UserSync("worker", "@a:b.c", "D", False, 2),
    ]
    assert exchange.acknowledged.of("worker") == 12
    assert exchange.syncing.users() == set()


async def test_a_user_that_cannot_be_sent_is_not_kept(
    net: Net, main: Process, worker: Process
) -> None:
    await net.main(main)
    speaker = await net.worker(worker)
    for device in ("\ud800", "x" * LINE_BYTES_MAX):
        with pytest.raises(ProtocolError):
            speaker.user_syncs("@a:b.c", device, syncing=True)
    await net.break_for(lambda: main.write(2))
    await main.write()
    await check_complete(worker, main)


@pytest.mark.parametrize("kind", ["TCP", "Redis"])
async def test_a_session_that_fails_is_followed_by_another(
    kind: str, main: Process, worker: Process, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(kind) as net:
        await net.main(main)
        exchange, failing = await net.worker(worker), FailsOnce()
        exchange.transport.subscribe(failing)
        await net.break_for(lambda: main.write(2))
        await main.write()
        await check_complete(worker, main)
    assert failing.links >= 3
    [failed] = [one for one in caplog.records if one.exc_info]
    assert failed.exc_info is not None
    assert failed.exc_info[0] is ZeroDivisionError


async def test_what_concerns_everybody_reaches_everybody_but_who_said_it(
    net: Net, main: Process, worker: Process, second: Process
) -> None:
    exchanges = [await net.main(main), await net.worker(worker), await net.worker(second)]
    kinds = (RemoteServerUp, LockReleased, NewActiveTask, CancelTask)
    heard = [Heard(exchange, *kinds) for exchange in exchanges]
    said = [
        RemoteServerUp("matrix.org"),
        LockReleased("worker", "n", "k"),
        NewActiveTask("t"),
        CancelTask("t"),
    ]
    exchanges[1].publish(*said)
    for other in (heard[0], heard[2]):
        assert [await other.next() for _ in said] == said
    exchanges[0].publish(RemoteServerUp("one.org"))
    assert [await other.next() for other in heard[1:]] == [RemoteServerUp("one.org")] * 2
    exchanges[2].publish(RemoteServerUp("two.org"))
    assert [await other.next() for other in heard[:2]] == [RemoteServerUp("two.org")] * 2
    assert heard[2].empty


async def test_who_syncs_is_told_to_a_main_process_that_comes_later(
    net: Net, main: Process, worker: Process
) -> None:
    exchange = await net.main(main)
    heard = Heard(exchange, UserSync)
    speaker = await net.worker(worker)
    speaker.user_syncs("@a:b.c", "D", syncing=True, at_ms=1)
    await heard.next()
    await net.break_for(lambda: asyncio.sleep(0))
    while exchange.syncing.workers() != {"worker": {("@a:b.c", "D")}}:
        await heard.next()
    assert exchange.syncing.last_sync_ms("@a:b.c") == 1


async def test_a_worker_that_leaves_takes_its_users_with_it(
    net: Net, main: Process, worker: Process, second: Process
) -> None:
    exchange = await net.main(main)
    heard = Heard(exchange, UserSync, RemoteServerUp)
    leaving, staying = await net.worker(worker), await net.worker(second)
    leaving.user_syncs("@a:b.c", "D", syncing=True)
    staying.user_syncs("@b:b.c", "D", syncing=True)
    for _ in range(2):
        await heard.next()
    await leaving.close()
    while "worker" in exchange.syncing.workers():
        staying.publish(RemoteServerUp("a.org"))
        await heard.next()
    assert exchange.syncing.users() == {"@b:b.c"}


async def test_one_that_has_left_says_and_hears_nothing(
    net: Net, main: Process, worker: Process, second: Process
) -> None:
    exchange = await net.main(main)
    leaving, staying = await net.worker(worker), await net.worker(second)
    heard, ended = Heard(exchange, RemoteServerUp), Heard(leaving, RemoteServerUp)
    await leaving.close()
    leaving.publish(RemoteServerUp("gone.org"))
    staying.publish(RemoteServerUp("here.org"))
    assert await heard.next() == RemoteServerUp("here.org")
    await main.write(2)
    await check_complete(second, main)
    assert ended.empty
    assert worker.seen.ids("main") == []
    await leaving.close()


# --------------------------------------------------------------------------------------------------
# of Redis alone


async def test_lines_that_are_no_commands_of_ours_are_let_pass(
    main: Process, worker: Process
) -> None:
    async with AsyncExitStack() as stack:
        net = RedisNet(stack)
        await net.main(main)
        await net.worker(worker)
        assert net.redis is not None
        reader, writer = await asyncio.open_unix_connection(net.redis.url.removeprefix("unix://"))
        for line in ("FUTURE_COMMAND 1", "", "RDATA events main ten []", "POSITION caches"):
            writer.write(f'PUBLISH {SERVER_NAME} "{line}"\r\n'.encode())
            assert (await reader.readline()).startswith(b":")
        writer.close()
        await main.write(3)
        await check_complete(worker, main)


async def test_addresses_of_users_go_to_a_channel_of_their_own(main: Process) -> None:
    async with AsyncExitStack() as stack:
        net = RedisNet(stack)
        exchange = await net.main(main)
        assert net.redis is not None
        reader, writer = await asyncio.open_unix_connection(net.redis.url.removeprefix("unix://"))
        writer.write(f"SUBSCRIBE {SERVER_NAME}/USER_IP\r\n".encode())
        while not (await reader.readline()).startswith(b":"):
            continue
        exchange.publish(UserIp("@a:b.c", "tok", "::1", "curl", None, 7))
        while not (line := await reader.readline()).startswith(b"USER_IP"):
            continue
        assert line == b'USER_IP @a:b.c ["tok","::1","curl",null,7]\r\n'
        writer.close()


async def test_the_users_of_a_worker_that_fell_silent_are_gone(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, ping_ms=20, timeout_ms=200)
    async with (
        await Database.open(dsn) as database,
        RedisServer() as redis,
        AsyncExitStack() as stack,
    ):
        exchanges = []
        for name in ("main", "worker", "clock"):
            transport = RedisTransport(redis.url, SERVER_NAME)
            exchanges.append(
                await stack.enter_async_context(
                    ReplicationPeer(await Process.start(database, name), transport)
                )
            )
            await transport.connected()
        heard = Heard(exchanges[0], UserSync)
        exchanges[1].user_syncs("@a:b.c", syncing=True)
        await heard.next()
        assert exchanges[0].syncing.is_syncing("@a:b.c")
        await exchanges[1].transport.close()
        positions = Heard(exchanges[2], Position)
        while exchanges[0].syncing.is_syncing("@a:b.c"):
            await positions.next()


async def test_facts_of_a_participant_are_left_to_it_until_it_falls_silent(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `serve --redis`, which reads them from the tables and may be behind or ahead."""
    limit(monkeypatch, ping_ms=20, timeout_ms=600_000)
    async with (
        await Database.open(dsn) as database,
        RedisServer() as redis,
        AsyncExitStack() as stack,
    ):
        hub, writer = [await Process.start(database, name) for name in ("hub", "writer")]
        peers = [
            ReplicationPeer(hub, RedisTransport(redis.url, SERVER_NAME), announces="all"),
            ReplicationPeer(writer, RedisTransport(redis.url, SERVER_NAME)),
            ReplicationPeer(handlers := Handlers(), RedisTransport(redis.url, SERVER_NAME)),
        ]
        heard: list[Command] = []
        for kind in (Rdata, Position):
            handlers.on(kind, heard.append)
        for peer in peers:
            await stack.enter_async_context(peer)
        names = Heard(peers[0], Name)
        while (await names.next()) != Name("writer"):
            pass

        def read(stream_id: int) -> None:
            hub.streams.advance(
                "caches", "writer", stream_id, [writer.fact(stream_id)], local=False
            )

        def of_the_writer() -> list[Command]:
            return [one for one in heard if f" writer {BEYOND}" in str(one)]

        read(BEYOND)
        peers[0].publish(RemoteServerUp("a.org"))
        await Heard(peers[2], RemoteServerUp).next()
        assert of_the_writer() == []
        await peers[1].close()
        peers[0]._present["writer"] = -inf
        positions = Heard(peers[2], Position)
        while not of_the_writer():
            await positions.next()
        assert of_the_writer() == [Position("caches", "writer", BEYOND, BEYOND)]
        rows = Heard(peers[2], Rdata)
        read(BEYOND + 1)
        assert str(await rows.next()).startswith(f"RDATA caches writer {BEYOND + 1} ")


@pytest.mark.parametrize(
    "timeout_ms,reason",
    [
        (400, "nothing has come for 0.4 s|Timeout"),
        (60_000, "too slow: 1[0-9]{6} bytes wait to be published"),
    ],
)
async def test_a_redis_that_takes_nothing_is_given_up_and_nothing_is_lost(
    dsn: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    timeout_ms: int,
    reason: str,
) -> None:
    """After a while, or before it, when more waits than may."""
    limit(
        monkeypatch,
        ping_ms=50,
        timeout_ms=timeout_ms,
        buffer_bytes_max=1_000_000 if timeout_ms > 1_000 else 1_000_000_000,
        page_rows_max=10_000,
    )
    async with (
        await Database.open(dsn) as database,
        RedisServer() as redis,
        AsyncExitStack() as stack,
    ):
        main, worker = [await Process.start(database, name) for name in ("main", "worker")]
        transports = [RedisTransport(redis.url, SERVER_NAME) for _ in range(2)]
        for process, transport in zip((main, worker), transports, strict=True):
            await stack.enter_async_context(ReplicationPeer(process, transport))
            await transport.connected()
        await main.write()
        await worker.seen.reached("main", main.position)
        redis.freeze()
        while transports[0].links:
            await main.write(100 if timeout_ms < 1_000 else 10_000)
        redis.thaw()
        await check_complete(worker, main)
    assert re.search(reason, caplog.text)


async def test_the_address_of_redis_must_be_one() -> None:
    with pytest.raises(InputError, match="the address of Redis"):
        RedisTransport("redis.example.org", SERVER_NAME)


async def test_who_waits_for_redis_is_told_that_it_was_closed() -> None:
    transport = RedisTransport("redis://127.0.0.1:1", SERVER_NAME)
    async with ReplicationPeer(Handlers(), transport):
        waiting = asyncio.create_task(transport.connected())
        await asyncio.sleep(0)
    with pytest.raises(StorageClosed):
        await waiting


async def test_a_transport_has_links_only_while_it_is_connected() -> None:
    assert RedisTransport("redis://127.0.0.1:1", SERVER_NAME).links == []
    assert ServerTransport(SERVER_NAME).links == []
    assert Hub().join("alone").links == []
