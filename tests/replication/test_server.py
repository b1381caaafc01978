"""The server, spoken to by hand."""

import asyncio
import json
from itertools import pairwise

import pytest

from storage.replication import Handlers, Server
from storage.replication.commands import FederationAck, LockReleased, RemoteServerUp, UserIp
from storage.replication.transport import ReplicationLimits
from storage.streams.feed import StreamRow
from tests.replication.processes import SERVER_NAME, Process, limit, netcat


async def test_a_session_by_hand(main: Process) -> None:
    async with await Server(main).serve() as server, netcat(server.port) as by_hand:
        assert server.address == ("127.0.0.1", server.port)
        assert await by_hand.hear() == f"SERVER {SERVER_NAME}"
        assert (await by_hand.hear()).startswith("PING 1")
        by_hand.say("", "NAME me", "   ", "REPLICATE")
        told = {await by_hand.hear() for _ in main.streams}
        assert told == {
            f"POSITION {name} main {at} {at}"
            for name in main.streams
            for at in [main.streams[name].positions()["main"]]
        }
        [first] = await main.write()
        assert (
            await by_hand.hear()
            == f'RDATA caches main {first} ["get_user_by_id",["{first}"],1550574873251]'
        )
        second, third = await main.write(2)
        assert (await by_hand.hear()).startswith(f"RDATA caches main {second} [")
        assert (await by_hand.hear()).startswith(f"RDATA caches main {third} [")
        [abandoned] = await main.write(abandon=True)
        assert await by_hand.hear() == f"POSITION caches main {third} {abandoned}"
        assert [connection.name.partition(" ")[0] for connection in server.connections] == ["me"]


async def test_rows_under_one_token_are_a_batch(main: Process) -> None:
    async with await Server(main).serve() as server, netcat(server.port) as by_hand:
        by_hand.say("REPLICATE")
        await by_hand.hear("POSITION caches")
        main.tell(
            54,
            [["get_user_by_id", [f"@test{n}:localhost:8823"], 1490197670513] for n in range(1, 5)],
        )
        assert [await by_hand.hear() for _ in range(4)] == [
            'RDATA caches main batch ["get_user_by_id",["@test1:localhost:8823"],1490197670513]',
            'RDATA caches main batch ["get_user_by_id",["@test2:localhost:8823"],1490197670513]',
            'RDATA caches main batch ["get_user_by_id",["@test3:localhost:8823"],1490197670513]',
            'RDATA caches main 54 ["get_user_by_id",["@test4:localhost:8823"],1490197670513]',
        ]


async def test_nothing_is_told_before_it_is_asked_for(main: Process) -> None:
    async with await Server(main).serve() as server, netcat(server.port) as by_hand:
        await by_hand.hear("PING")
        [first] = await main.write()
        by_hand.say("REPLICATE")
        assert (await by_hand.hear()).startswith("POSITION")
        assert await by_hand.hear("POSITION caches") == f"POSITION caches main {first} {first}"


async def test_a_row_that_is_too_long_for_a_line_is_a_hole(main: Process) -> None:
    async with await Server(main).serve() as server, netcat(server.port) as by_hand:
        by_hand.say("REPLICATE")
        at = main.position
        await by_hand.hear("POSITION caches")
        main.streams.advance(
            "caches",
            "main",
            at + 4,
            [
                StreamRow(at + 1, "main", ["a"]),
                StreamRow(at + 2, "main", ["x" * 20_000]),
                StreamRow(at + 3, "main", ["c"]),
            ],
        )
        assert [await by_hand.hear() for _ in range(4)] == [
            f'RDATA caches main {at + 1} ["a"]',
            f"POSITION caches main {at + 2} {at + 2}",
            f'RDATA caches main {at + 3} ["c"]',
            f"POSITION caches main {at + 3} {at + 4}",
        ]


async def test_a_stopping_server_says_so(main: Process) -> None:
    server = await Server(main).serve()
    port = server.port
    async with netcat(port) as by_hand:
        await by_hand.hear("PING")
        stopping = asyncio.create_task(server.close())
        assert await by_hand.all() == ["ERROR server stopping"]
        by_hand.writer.close()
        await stopping
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize(
    "line,reason",
    [
        ("HELLO", "unknown command"),
        ("FEDERATION_ACK sender", "1 of 2 arguments"),
        ("RDATA events main 1 []", "a client must not send RDATA"),
        ("POSITION events main 1 1", "a client must not send POSITION"),
        ("x" * 16_385, "more than 16384 bytes"),
        ("REMOTE_SERVER_UP \udcff", "not UTF-8"),
    ],
)
async def test_a_bad_line_is_answered_with_an_error(main: Process, line: str, reason: str) -> None:
    async with await Server(main).serve() as server, netcat(server.port) as by_hand:
        await by_hand.hear("PING")
        by_hand.writer.write(line.encode(errors="surrogateescape") + b"\n")
        [error] = await by_hand.all()
        assert error.startswith("ERROR ")
        assert reason in error


async def test_a_line_that_does_not_end_is_refused_while_it_comes(main: Process) -> None:
    async with await Server(main).serve() as server, netcat(server.port) as by_hand:
        await by_hand.hear("PING")
        by_hand.writer.write(b"PING " + b"x" * 20_000)
        assert await by_hand.all() == ["ERROR a line of more than 16384 bytes"]


async def test_a_line_may_come_in_pieces_and_end_as_telnet_ends_it(main: Process) -> None:
    heard: asyncio.Queue[RemoteServerUp] = asyncio.Queue()
    handlers = Handlers()
    handlers.on(RemoteServerUp, heard.put_nowait)
    async with (
        await Server(main, handlers=handlers).serve() as server,
        netcat(server.port) as by_hand,
    ):
        for piece in (b"REMOTE_SER", b"VER_UP m\xc3", b"\xa4trix.org\r", b"\n"):
            by_hand.writer.write(piece)
            await by_hand.writer.drain()
            await asyncio.sleep(0)
        assert (await heard.get()).server_name == "mätrix.org"


# --------------------------------------------------------------------------------------------------
# keeping alive


async def test_pings_come_at_once_and_then_at_intervals(
    main: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (ReplicationLimits().ping_ms, ReplicationLimits().timeout_ms) == (5_000, 15_000)
    limit(monkeypatch, ping_ms=20)
    async with await Server(main).serve() as server, netcat(server.port) as by_hand:
        times = [int((await by_hand.hear("PING")).removeprefix("PING ")) for _ in range(4)]
        assert all(later - earlier >= 15 for earlier, later in pairwise(times))


async def test_only_who_has_sent_a_ping_is_timed(
    main: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, ping_ms=20, timeout_ms=60)
    async with (
        await Server(main).serve() as server,
        netcat(server.port) as silent,
        netcat(server.port) as timed,
    ):
        silent.say("NAME patient")
        timed.say("PING")
        assert (await timed.all())[-1] == "ERROR nothing has come for 0.06 s"
        for _ in range(5):
            assert (await silent.hear("PING")).startswith("PING")
        assert [
            connection.name.partition(" ")[0]
            for connection in server.connections
            if connection.refused is None
        ] == ["patient"]


async def test_any_line_keeps_a_connection_alive(
    main: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, ping_ms=20, timeout_ms=2_000)
    async with await Server(main).serve() as server, netcat(server.port) as by_hand:
        by_hand.say("PING")
        for _ in range(120):
            await by_hand.hear("PING")
            by_hand.say("REMOTE_SERVER_UP example.org")
        assert len(server.connections) == 1


async def test_who_reads_too_slowly_is_disconnected_at_the_bound(
    main: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, buffer_bytes_max=100_000, close_ms=500)
    async with (
        await Server(main).serve() as server,
        netcat(server.port) as quick,
        netcat(server.port, limit=1_000) as slow,
    ):
        for one in (quick, slow):
            one.say("REPLICATE")
        await quick.hear("POSITION caches")
        while not any(connection.refused for connection in server.connections):
            main.tell(main.position + 1, [["x" * 1_000] for _ in range(10)])
            await quick.hear(f"RDATA caches main {main.position}")
        [refused] = [connection for connection in server.connections if connection.refused]
        assert refused.refused is not None
        assert refused.refused.startswith("too slow: ")
        assert int(refused.refused.split()[2]) <= 100_000
        last = (await slow.all())[-1]
        assert last == f"ERROR {refused.refused}"
        main.tell(main.position + 1, [["still there"]])
        assert (
            await quick.hear(f"RDATA caches main {main.position} ")
            == f'RDATA caches main {main.position} ["still there"]'
        )


async def test_who_never_reads_is_gone_after_a_while(
    main: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, buffer_bytes_max=100_000, close_ms=20)
    async with (
        await Server(main).serve() as server,
        netcat(server.port, limit=1_000) as slow,
    ):
        slow.say("NAME slow", "REPLICATE")
        await slow.hear("POSITION")
        [connection] = server.connections
        while connection.refused is None:
            main.tell(main.position + 1, [["x" * 1_000] for _ in range(10)])
            await asyncio.sleep(0)
        await connection.ended.wait()
        assert server.connections == []


# --------------------------------------------------------------------------------------------------
# what workers say


async def test_who_syncs_on_which_worker_is_known_until_the_worker_goes(main: Process) -> None:
    async with (
        await Server(main).serve() as server,
        netcat(server.port) as one,
        netcat(server.port) as two,
    ):
        one.say(
            "USER_SYNC w1 @a:b.c PHONE start 10",
            "USER_SYNC w1 @a:b.c None start 12",
            "USER_SYNC w1 @b:b.c start 11",
        )
        two.say(
            "USER_SYNC w2 @a:b.c PHONE start 9",
            "USER_SYNC w2 @c:b.c D start 9",
            "USER_SYNC w2 @c:b.c D end 10",
        )
        for worker in (one, two):
            worker.say("REPLICATE")
            await worker.hear("POSITION")
        syncing = server.syncing
        assert syncing.users() == {"@a:b.c", "@b:b.c"}
        assert syncing.workers() == {
            "w1": {("@a:b.c", "PHONE"), ("@a:b.c", None), ("@b:b.c", None)},
            "w2": {("@a:b.c", "PHONE")},
        }
        assert syncing.last_sync_ms("@a:b.c") == 12
        one.say("CLEAR_USER_SYNC w1", "REPLICATE")
        await one.hear("POSITION caches")
        await one.hear("POSITION caches")
        assert syncing.users() == {"@a:b.c"}
        [_, connection] = server.connections
        two.writer.write_eof()
        await connection.ended.wait()
        assert syncing.users() == set()
        assert not syncing.is_syncing("@a:b.c")
        assert syncing.last_sync_ms("@a:b.c") is None


async def test_a_worker_that_comes_back_tells_anew(
    main: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old connection is silent: nobody has ended it."""
    limit(monkeypatch, ping_ms=100, timeout_ms=60_000)
    async with (
        await Server(main).serve() as server,
        netcat(server.port) as lost,
        netcat(server.port) as back,
    ):
        lost.say("USER_SYNC w1 @a:b.c None start 10", "REPLICATE")
        await lost.hear("POSITION")
        [first, _] = server.connections
        await asyncio.sleep(0.3)
        assert first.silent_s() >= 0.2
        back.say("USER_SYNC w1 @b:b.c None start 11", "REPLICATE")
        await back.hear("POSITION")
        assert server.syncing.users() == {"@b:b.c"}
        assert (await lost.all())[-1] == "ERROR w1 is back over another connection"
        lost.writer.transport.abort()
        await first.ended.wait()
        assert server.syncing.users() == {"@b:b.c"}


async def test_acknowledged_positions_are_kept_per_worker(main: Process) -> None:
    async with await Server(main).serve() as server, netcat(server.port) as worker:
        assert server.acknowledged.lowest() is None
        worker.say(
            "FEDERATION_ACK s1 10", "FEDERATION_ACK s2 7", "FEDERATION_ACK s1 9", "REPLICATE"
        )
        await worker.hear("POSITION")
        assert (
            server.acknowledged.of("s1"),
            server.acknowledged.of("s2"),
            server.acknowledged.of("s3"),
        ) == (10, 7, None)
        assert server.acknowledged.lowest() == 7
        server.acknowledged.forget("s2")
        assert server.acknowledged.lowest() == 10


async def test_what_concerns_everybody_is_passed_on_to_the_others(main: Process) -> None:
    async with (
        await Server(main).serve() as server,
        netcat(server.port) as one,
        netcat(server.port) as two,
        netcat(server.port) as three,
    ):
        for worker in (one, two, three):
            await worker.hear("PING")
        lines = [
            "REMOTE_SERVER_UP matrix.org",
            'LOCK_RELEASED ["w1", "purge", "!r"]',
            "NEW_ACTIVE_TASK t",
            "CANCEL_TASK t",
        ]
        one.say("USER_SYNC w1 @a:b.c None start 10", *lines, "FEDERATION_ACK s 1")
        for worker in (two, three):
            assert [await worker.hear() for _ in lines] == lines
        server.publish(RemoteServerUp("example.org"))
        for worker in (one, two, three):
            assert await worker.hear() == "REMOTE_SERVER_UP example.org"


async def test_handlers_hear_of_every_command(main: Process) -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()
    handlers = Handlers()

    def fails(_: object) -> None:
        raise RuntimeError("of the homeserver's own making")

    for kind in (UserIp, LockReleased, FederationAck):
        handlers.on(kind, fails)
        handlers.on(kind, heard.put_nowait)
    forget = handlers.on(RemoteServerUp, fails)
    forget()
    async with (
        await Server(main, handlers=handlers).serve() as server,
        netcat(server.port) as worker,
    ):
        row = json.dumps(["tok", "::1", "curl", None, 7])
        worker.say(
            f"USER_IP @a:b.c {row}",
            "REMOTE_SERVER_UP x.org",
            'LOCK_RELEASED ["w","n","k"]',
            "FEDERATION_ACK s 5",
        )
        assert [await heard.get() for _ in range(3)] == [
            UserIp("@a:b.c", "tok", "::1", "curl", None, 7),
            LockReleased("w", "n", "k"),
            FederationAck("s", 5),
        ]


async def test_a_server_listens_once(main: Process) -> None:
    server = Server(main)
    with pytest.raises(RuntimeError, match="does not listen"):
        _ = server.port
    async with await server.serve():
        with pytest.raises(RuntimeError, match="already"):
            await server.serve()
