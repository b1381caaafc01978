"""What a connection may say in the name of a worker, and how much of it is kept."""

import asyncio
import tracemalloc

import pytest

import storage
from storage.errors import ProtocolError
from storage.replication import Handlers, Server
from storage.replication.commands import FederationAck, LockReleased, UserSync
from storage.replication.follower import UNKNOWN_MAX, StreamsTarget
from storage.replication.in_process import Hub
from storage.replication.peer import ReplicationPeer
from storage.replication.syncing import UNLINKED_MAX, Acknowledgements, Syncing
from tests.replication.processes import QUICK, Lines, Process, limit, netcat

LINES = 60_000
BYTES_MAX = 24_000_000


async def settled(by_hand: Lines, main: Process) -> None:
    """Wait until everything that was said is dealt with."""
    await by_hand.writer.drain()
    by_hand.say("REPLICATE")
    for _ in main.streams:
        await by_hand.hear("POSITION")


@pytest.mark.parametrize(
    "line",
    [
        "CLEAR_USER_SYNC w1",
        "USER_SYNC w1 @a:b.c None end 11",
        "USER_SYNC w1 @mallory:b.c None start 11",
        "FEDERATION_ACK w1 99",
        'LOCK_RELEASED ["w1","purge","!r"]',
    ],
)
async def test_nobody_speaks_for_the_worker_of_another_connection(main: Process, line: str) -> None:
    heard: list[LockReleased] = []
    handlers = Handlers()
    handlers.on(LockReleased, heard.append)
    async with (
        await Server(main, handlers=handlers).serve() as server,
        netcat(server.port) as worker,
        netcat(server.port) as other,
    ):
        worker.say("USER_SYNC w1 @a:b.c None start 10", "FEDERATION_ACK w1 5")
        await settled(worker, main)
        other.say(line)
        assert (await other.all())[-1] == "ERROR w1 is the name of another connection"
        assert server.syncing.workers() == {"w1": {("@a:b.c", None)}}
        assert server.acknowledged.of("w1") == 5
        assert heard == []
        worker.say("USER_SYNC w1 @b:b.c None start 12")
        await settled(worker, main)
        assert server.syncing.users() == {"@a:b.c", "@b:b.c"}


async def test_nothing_that_was_refused_is_passed_on(main: Process) -> None:
    async with (
        await Server(main).serve() as server,
        netcat(server.port) as worker,
        netcat(server.port) as other,
    ):
        worker.say("FEDERATION_ACK w1 5")
        await settled(worker, main)
        other.say('LOCK_RELEASED ["w1","purge","!r"]')
        await other.all()
        server.publish(LockReleased("main", "n", "k"))
        assert await worker.hear("LOCK_RELEASED") == 'LOCK_RELEASED ["main","n","k"]'


async def test_nobody_speaks_for_the_server_itself(main: Process) -> None:
    async with await Server(main).serve() as server, netcat(server.port) as other:
        other.say("FEDERATION_ACK main 99")
        assert (await other.all())[-1] == "ERROR main is the name of this process"
        assert server.acknowledged.lowest() is None


async def test_a_name_is_free_when_its_connection_has_ended(main: Process) -> None:
    async with await Server(main).serve() as server, netcat(server.port) as again:
        async with netcat(server.port) as worker:
            worker.say("FEDERATION_ACK w1 5")
            await settled(worker, main)
            [_, connection] = server.connections
        await connection.ended.wait()
        again.say("FEDERATION_ACK w1 7")
        await settled(again, main)
        assert server.acknowledged.of("w1") == 7


async def test_names_that_are_ever_new_do_not_pile_up(main: Process) -> None:
    """Each command of those that are kept, under new names, and new users under one name."""
    async with await Server(main).serve() as server, netcat(server.port) as by_hand:
        await settled(by_hand, main)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for first in range(0, LINES, 50):
                some = range(first, first + 50)
                by_hand.say(
                    *(f"USER_SYNC w{n} @u{n}:b.c D start 1" for n in some),
                    *(f"FEDERATION_ACK w{n} {n}" for n in some),
                )
                by_hand.say(*(f"USER_SYNC one @u{n}:b.c D start 1" for n in some))
                await by_hand.writer.drain()
            await settled(by_hand, main)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(server.exchange.syncing.workers()) <= QUICK.names_max
        assert sum(map(len, server.syncing.workers().values())) == QUICK.sessions_max
        assert len(server.acknowledged) <= QUICK.names_max + UNLINKED_MAX
        assert ("@u59999:b.c", "D") in server.syncing.workers()["one"]
        assert after - before < BYTES_MAX, f"{after - before} bytes"


async def test_the_oldest_users_of_a_connection_are_dropped(main: Process) -> None:
    link = object()
    syncing = Syncing(3)
    for n in range(5):
        syncing.record(UserSync("w1", f"@{n}:b.c", None, True, n), link)
    assert syncing.users() == {"@2:b.c", "@3:b.c", "@4:b.c"}
    syncing.record(UserSync("w1", "@2:b.c", None, True, 6), link)
    syncing.record(UserSync("w2", "@5:b.c", None, True, 7), link)
    assert syncing.workers() == {
        "w1": {("@2:b.c", None), ("@4:b.c", None)},
        "w2": {("@5:b.c", None)},
    }
    syncing.record(UserSync("w3", "@6:b.c", None, True, 7), object())
    assert len(syncing.users()) == 4
    syncing.lost(link)
    assert syncing.users() == {"@6:b.c"}


@pytest.mark.parametrize(
    "user_id,device_id", [("@" + "u" * 511 + "é", None), ("@a:b.c", "D" * 513)]
)
async def test_an_id_that_is_too_long_is_refused(user_id: str, device_id: str | None) -> None:
    syncing = Syncing()
    with pytest.raises(ProtocolError, match="more than 512 bytes"):
        syncing.record(UserSync("w1", user_id, device_id, True, 1), object())
    assert syncing.workers() == {}


async def test_a_worker_that_has_gone_counts_for_a_while() -> None:
    now = 0.0
    acknowledged = Acknowledgements(1_000, lambda: now)
    acknowledged.record(FederationAck("s1", 5))
    acknowledged.record(FederationAck("s2", 9))
    acknowledged.lost(["s1", "nobody"])
    now = 1.0
    assert (acknowledged.of("s1"), acknowledged.lowest()) == (5, 5)
    now = 1.1
    assert (acknowledged.of("s1"), acknowledged.lowest()) == (None, 9)
    acknowledged.lost(["s2"])
    now = 2.0
    acknowledged.record(FederationAck("s2", 8))
    now = 60.0
    assert acknowledged.lowest() == 9


async def test_of_workers_that_have_gone_only_so_many_are_remembered() -> None:
    acknowledged = Acknowledgements()
    for n in range(UNLINKED_MAX + 5):
        acknowledged.record(FederationAck(f"s{n}", n))
        acknowledged.lost([f"s{n}"])
    assert len(acknowledged) == UNLINKED_MAX
    assert acknowledged.lowest() == 5


async def test_a_worker_in_the_same_process_keeps_its_name(
    main: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    async with ReplicationPeer(main, hub.join("main")) as exchange:
        limit(monkeypatch, ping_ms=1, timeout_ms=2)
        one = ReplicationPeer(Handlers(), hub.join("one"), instance_name="w1")
        async with one:
            one.user_syncs("@a:b.c", syncing=True)
            await asyncio.sleep(0.02)
            other = ReplicationPeer(Handlers(), hub.join("other"), instance_name="w1")
            other.start()
            other.user_syncs("@b:b.c", syncing=True)
            await asyncio.sleep(0.02)
            assert exchange.syncing.users() == {"@a:b.c"}
            await other.close()


async def test_names_of_streams_are_logged_up_to_a_number(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with storage.open(dsn, server_name="s1.test") as store:
        target = StreamsTarget(store.streams)
    with caplog.at_level("INFO"):
        for number in range(1_000):
            assert not target.follows(f"stream{number}", "other")
            assert not target.follows(f"stream{number}", "other")
    assert sum("is not one of this store" in one for one in caplog.messages) == UNKNOWN_MAX
