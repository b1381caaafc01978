"""The client: whatever happens to its connection, each fact arrives once, in its writer's order."""

import asyncio

import pytest

from storage.errors import ProtocolError, StorageClosed
from storage.replication import Client, Handlers, Server
from storage.replication.commands import Position, Rdata, RemoteServerUp
from storage.streams.feed import Advance, StreamRow
from tests.replication.processes import QUICK, SERVER_NAME, Process, limit
from tests.replication.proxies import Proxy
from tests.replication.sessions import FakeServer, check_complete, connected

# --------------------------------------------------------------------------------------------------
# the lines


async def test_a_client_says_who_it_is_and_asks(worker: Process) -> None:
    async with FakeServer() as fake, fake.client(worker):
        session = await fake.session()
        assert await session.hear() == "NAME worker"
        lines = {await session.hear(), await session.hear()}
        assert "REPLICATE" in lines
        assert any(line.startswith("PING ") for line in lines)


async def test_a_server_of_another_name_is_refused(worker: Process, main: Process) -> None:
    other = await Process.start(main.database, "other", "elsewhere.org")
    async with (
        await Server(other).serve() as server,
        Client(worker, "127.0.0.1", server.port) as client,
    ):
        with pytest.raises(
            ProtocolError, match=r"connected to elsewhere\.org, wanted was example\.com"
        ):
            await client.connected()
        await other.write()
    assert worker.seen.ids("other") == []


async def test_the_server_is_told_why_it_is_refused(worker: Process) -> None:
    async with FakeServer() as fake, fake.client(worker):
        session = await fake.session()
        session.say("SERVER elsewhere.org", "POSITION caches main 99 99")
        assert (
            await session.hear("ERROR")
            == "ERROR connected to elsewhere.org, wanted was example.com"
        )
    assert worker.seen.advances == []


@pytest.mark.parametrize(
    "line,reason",
    [
        ("HELLO", "unknown command"),
        ("REPLICATE", "a server must not send REPLICATE"),
        ("RDATA caches main 10 [1", "not JSON"),
        ('RDATA events main 10 {"event_id":"$a"}', "malformed row of the stream events"),
        ('RDATA events main 10 ["$a"]', "malformed row of the stream events"),
        ("RDATA receipts main 10 []", "malformed row of the stream receipts"),
        ("RDATA account_data main 10 [7]", "malformed row of the stream account_data"),
        ("POSITION caches main 12 11", "a position before the previous one"),
    ],
)
async def test_a_bad_line_is_answered_with_an_error_and_a_new_connection(
    worker: Process, line: str, reason: str
) -> None:
    async with FakeServer() as fake, fake.client(worker):
        session = await fake.session()
        session.say(f"SERVER {SERVER_NAME}", line)
        assert reason in await session.hear("ERROR")
        session.writer.close()
        again = await fake.session()
        assert await again.hear("REPLICATE") == "REPLICATE"


async def test_rows_before_the_name_of_the_server_are_refused(worker: Process) -> None:
    async with FakeServer() as fake, fake.client(worker):
        session = await fake.session()
        session.say("PING 1", 'RDATA caches main 10 ["a"]')
        assert await session.hear("ERROR") == "ERROR RDATA before SERVER"


async def test_an_error_is_told_to_handlers_and_a_lost_connection_made_again(
    worker: Process,
) -> None:
    async with FakeServer() as fake, fake.client(worker) as client:
        session = await fake.session()
        session.say(f"SERVER {SERVER_NAME}")
        await client.connected()
        session.say("ERROR server stopping")
        session.writer.close()
        again = await fake.session()
        assert await again.hear("NAME") == "NAME worker"


async def test_a_silent_server_counts_as_gone_once_it_has_sent_a_ping(
    worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, ping_ms=20, timeout_ms=60)
    async with FakeServer() as fake, fake.client(worker):
        session = await fake.session()
        session.say(f"SERVER {SERVER_NAME}", "PING 1")
        assert await session.hear("ERROR") == "ERROR nothing has come for 0.06 s"
        session.writer.close()
        await fake.session()


async def test_a_stream_that_is_not_ours_is_ignored(worker: Process) -> None:
    async with FakeServer() as fake, fake.client(worker):
        session = await fake.session()
        session.say(
            f"SERVER {SERVER_NAME}",
            "POSITION typing main 5 5",
            'RDATA typing main 6 ["!r",[]]',
            'RDATA caches w 7 ["c",null,1]',
        )
        await worker.seen.reached("w", 7)
        assert list(worker.seen.facts) == [("caches", "w")]


async def test_batches_of_two_writers_do_not_mix(worker: Process) -> None:
    async with FakeServer() as fake, fake.client(worker):
        session = await fake.session()
        session.say(f"SERVER {SERVER_NAME}")
        session.say("POSITION caches a 0 5", "POSITION caches b 0 5", "POSITION receipts a 0 5")
        session.say(
            'RDATA caches a batch ["a1"]',
            'RDATA caches b batch ["b1"]',
            'RDATA receipts a batch ["ra1"]',
            'RDATA caches a batch ["a2"]',
            'RDATA caches b 11 ["b2"]',
            'RDATA caches a 12 ["a3"]',
            'RDATA receipts a 3 ["late, and known"]',
            'RDATA receipts a 8 ["ra2"]',
        )
        await worker.seen.reached("a", 8, "receipts")
    assert worker.seen.facts == {
        ("caches", "b"): [StreamRow(11, "b", ["b1"]), StreamRow(11, "b", ["b2"])],
        ("caches", "a"): [
            StreamRow(12, "a", ["a1"]),
            StreamRow(12, "a", ["a2"]),
            StreamRow(12, "a", ["a3"]),
        ],
        ("receipts", "a"): [StreamRow(8, "a", ["ra2"])],
    }


# --------------------------------------------------------------------------------------------------
# facts arrive


async def test_facts_arrive_as_they_are_written(main: Process, worker: Process) -> None:
    async with await Server(main).serve() as server, connected(worker, server.port):
        for count in (1, 3, 1):
            await main.write(count)
        await check_complete(worker, main)
        position = main.position
        [abandoned] = await main.write(abandon=True)
        await worker.seen.reached("main", abandoned)
    last = worker.seen.advances[-1]
    assert last == Advance("caches", "main", position, abandoned, [], local=False)
    assert worker.streams["caches"].positions()["main"] == abandoned


async def test_what_was_written_before_the_connection_is_read_in_pages(
    main: Process, worker: Process
) -> None:
    for count in (3, 20, 1):
        await main.write(count)
    async with await Server(main).serve() as server, connected(worker, server.port):
        await check_complete(worker, main)
    assert max(len(advance.rows) for advance in worker.seen.advances) <= QUICK.page_rows_max


async def test_a_server_passes_on_what_it_learns_of_others(main: Process, worker: Process) -> None:
    far = await Process.start(main.database, "far")
    async with (
        await Server(far).serve() as far_server,
        connected(main, far_server.port),
        await Server(main).serve() as server,
        connected(worker, server.port),
    ):
        await far.write(2)
        await main.write(2)
        await far.write(2)
        await check_complete(worker, main, far)


async def test_a_writer_does_not_learn_of_itself(main: Process, worker: Process) -> None:
    async with (
        await Server(main).serve() as server,
        connected(worker, server.port),
        await Server(worker).serve() as back,
        connected(main, back.port),
    ):
        await main.write(2)
        await worker.write(2)
        await check_complete(main, worker)
        await check_complete(worker, main)
    assert main.seen.ids("main") == await main.written()
    assert worker.seen.ids("worker") == await worker.written()


async def test_over_two_connections_nothing_comes_twice(main: Process, worker: Process) -> None:
    async with (
        await Server(main).serve() as server,
        await Server(main).serve() as other,
        connected(worker, server.port),
        connected(worker, other.port),
    ):
        for _ in range(20):
            await main.write(2)
        await check_complete(worker, main)


# --------------------------------------------------------------------------------------------------
# holes


# --------------------------------------------------------------------------------------------------
# what is said


async def test_what_a_worker_says_reaches_the_server_and_is_said_again_after_a_break(
    main: Process, worker: Process
) -> None:
    async with await Server(main).serve() as server, Proxy(server.port) as proxy:
        heard: asyncio.Queue[object] = asyncio.Queue()
        server.handlers.on(RemoteServerUp, heard.put_nowait)
        async with connected(worker, proxy.port) as client:
            client.user_syncs("@a:b.c", "PHONE", syncing=True, at_ms=5)
            client.user_syncs("@b:b.c", syncing=True)
            client.user_syncs("@b:b.c", syncing=False)
            client.acknowledge(41)
            client.publish(RemoteServerUp("matrix.org"))
            await heard.get()
            assert server.syncing.workers() == {"worker": {("@a:b.c", "PHONE")}}
            [connection] = server.connections
            proxy.cut()
            await connection.ended.wait()
            assert server.syncing.workers() == {}
            await client.connected()
            client.publish(RemoteServerUp("matrix.org"))
            await heard.get()
            assert server.syncing.workers() == {"worker": {("@a:b.c", "PHONE")}}
            assert server.syncing.last_sync_ms("@a:b.c") == 5
            assert server.acknowledged.of("worker") == 41
            [connection] = server.connections
        await connection.ended.wait()
        assert server.syncing.workers() == {}


async def test_handlers_without_a_store(main: Process) -> None:
    heard: asyncio.Queue[Advance | Position | Rdata] = asyncio.Queue()
    fetched: list[tuple[str, str, int, int, int]] = []

    async def fetch(stream: str, writer: str, after: int, upto: int, limit: int) -> list[StreamRow]:
        fetched.append((stream, writer, after, upto, limit))
        return await main.streams[stream].rows(after, upto, limit, instance_name=writer)

    handlers = Handlers(fetch=fetch)
    handlers.on(Advance, heard.put_nowait)
    start = main.position
    async with (
        await Server(main).serve() as server,
        Proxy(server.port) as proxy,
        Client(handlers, "127.0.0.1", proxy.port, server_name=SERVER_NAME) as client,
    ):
        while (await heard.get()) != Advance("caches", "main", start, start, [], local=False):
            continue
        [first] = await main.write()
        assert await heard.get() == Advance(
            "caches", "main", start, first, [main.fact(first)], local=False
        )
        proxy.open = False
        proxy.cut()
        [second] = await main.write()
        proxy.open = True
        await client.connected()
        advance = await heard.get()
        assert isinstance(advance, Advance)
        assert [fact.stream_id for fact in advance.rows] == [second]
        assert fetched == [("caches", "main", first, second, QUICK.page_rows_max)]


async def test_a_closed_client_says_so_to_who_waits(worker: Process) -> None:
    async with Proxy(1) as nobody:
        nobody.open = False
        client = Client(worker, "127.0.0.1", nobody.port)
        client.start()
        waiting = asyncio.create_task(client.connected())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(StorageClosed):
            await waiting
