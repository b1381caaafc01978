"""Sixteen writers with delays, rollbacks, killed processes, and connections that break in COMMIT.

The delays are between taking an id and committing. Readers see each committed fact exactly once,
in order per writer and by the linear position. Some readers poll. One is behind a TCP connection
that breaks anywhere, and one on a Redis that is killed and started again.

A reader that queries `id > last` misses facts under the same load, so the load is hard enough.
Each message that was sent is there once, and no message that failed.
"""

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import asyncpg
import pytest

import storage
from storage import Store
from storage.database.connection import Database
from storage.replication import Client, ReplicationPeer, Server
from storage.replication.redis_transport import RedisTransport
from storage.streams.position_poller import follow_once
from tests.replication.processes import Seen
from tests.replication.proxies import Proxy, through, unix_socket_of
from tests.replication.redis_server import RedisServer
from tests.streams.readers import STREAM, LinearReader, Listener, NaiveReader
from tests.streams.writer_process import CONFIG

WRITERS = 12
PROCESSES = 4
FACTS_EACH = 20
KILLS_EACH = 2
REDIS_RESTARTS = 3
INCARNATION = 1_000_000  # the numbers of a process that comes back begin anew

SLOW_AND_FAILING = """
CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(random() * 0.02);
    IF random() < 0.1 THEN
        RAISE EXCEPTION 'unlucky';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER be_slow BEFORE INSERT ON to_device FOR EACH ROW EXECUTE FUNCTION be_slow();
CREATE FUNCTION be_slow_to_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(CASE WHEN random() < 0.1 THEN 0.1 ELSE 0.01 END * random());
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER be_slow_to_commit AFTER INSERT ON to_device DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION be_slow_to_commit();
"""

COMMITTED = (
    "SELECT a.stream_id, w.instance_name FROM to_device a JOIN writers w USING (writer_nid) "
    "ORDER BY a.stream_id"
)
NUMBERS = """
SELECT w.instance_name, convert_from(a.content, 'UTF8') FROM to_device a
    JOIN writers w USING (writer_nid) ORDER BY a.stream_id
"""
CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name ~ '^room-storage [wp]' ORDER BY random()
    LIMIT 1
"""


class SentMessages:
    """What became of the messages, as far as their senders know.

    Those of a killed process that were not reported: unknown.
    """

    def __init__(self) -> None:
        self.done: dict[str, list[int]] = {}
        self.failed: dict[str, set[int]] = {}

    def check(self, found: Mapping[str, Sequence[int]]) -> None:
        for writer, numbers in found.items():
            assert list(numbers) == sorted(set(numbers)), (
                f"{writer} has written something twice, or out of order"
            )
            assert self.failed.get(writer, set()).isdisjoint(numbers)
        for writer, numbers in self.done.items():
            assert set(numbers) <= set(found[writer])


async def _write(store: Store, sent: SentMessages, rng: random.Random) -> None:
    done, failed = (
        sent.done.setdefault(store.instance_name, []),
        sent.failed.setdefault(store.instance_name, set()),
    )
    for number in range(FACTS_EACH):
        try:
            await store.to_device.send(
                {storage.UserId(f"@{store.instance_name}:s1.test"): {"device": {"n": number}}}
            )
            done.append(number)
        except storage.CommitUnknown:
            pass  # it may be there or not, but once
        except storage.DatabaseError:
            failed.add(number)
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random() * 0.05)


@asynccontextmanager
async def _run(
    dsn: str, name: str, redis: str, first: int, count: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A writer process; killed at the end, if it has not ended by itself."""
    arguments = ["-m", "tests.streams.writer_process", dsn, name, redis, str(first), str(count)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def _kill_and_restart(
    dsn: str, name: str, redis: str, sent: SentMessages, rng: random.Random
) -> None:
    """Kill a writer process during its work and restart it under its name, again and again.

    The last one stays.
    """
    done = sent.done.setdefault(name, [])
    for incarnation in range(KILLS_EACH):
        async with _run(dsn, name, redis, incarnation * INCARNATION, -1) as process:
            assert process.stdout is not None
            for _ in range(rng.randint(3, 10)):
                done.append(int(await process.stdout.readline()))
            process.kill()
            rest, _ = await process.communicate()
        done += [int(line) for line in rest.splitlines(keepends=True) if line.endswith(b"\n")]
    async with _run(dsn, name, redis, KILLS_EACH * INCARNATION, 3) as process:
        last, _ = await process.communicate()
    done += map(int, last.splitlines())


async def _restart(redis: RedisServer) -> None:
    """Kill the server and start it again, while the others work."""
    for _ in range(REDIS_RESTARTS):
        await asyncio.sleep(0.7)
        await redis.stop()
        await asyncio.sleep(0.1)
        await redis.start()


async def _listen(
    stack: AsyncExitStack, dsn: str, hub: Store, redis: RedisServer, rng: random.Random
) -> tuple[Listener, Listener, Proxy]:
    """Who hears of everything by a connection that breaks, and who does by Redis."""
    database = await stack.enter_async_context(
        await Database.open(dsn, config=replace(CONFIG, instance_name="listeners", pool_size_max=6))
    )
    tcp, over_redis = await Listener.start(database, "tcp"), await Listener.start(database, "redis")
    server = await stack.enter_async_context(await Server(hub).serve())
    proxy = await stack.enter_async_context(Proxy(server.port))
    proxy.cut_after = lambda: rng.randint(1, 3_000)
    await stack.enter_async_context(Client(tcp, "127.0.0.1", proxy.port))
    transport = RedisTransport(redis.url, "s1.test")
    await stack.enter_async_context(ReplicationPeer(over_redis, transport))
    await transport.connected()
    return tcp, over_redis, proxy


async def _read_and_cut(
    linear: LinearReader,
    admin: asyncpg.Connection,
    postgres: Proxy,
    work: "asyncio.Future[list[None]]",
    rng: random.Random,
) -> None:
    """Stall a reader now and then and cut connections from either end, until the work is done."""
    while not work.done():
        await linear.read()
        if rng.random() < 0.1:
            await admin.execute(CUT)
        if rng.random() < 0.1:
            postgres.cut()
        await asyncio.sleep(0.3 if rng.random() < 0.1 else rng.random() * 0.03)


async def _numbers(admin: asyncpg.Connection) -> dict[str, list[int]]:
    """The numbers of the messages that are there, by writer, in the order of the stream."""
    found: dict[str, list[int]] = {}
    for name, content in await admin.fetch(NUMBERS):
        found.setdefault(name, []).append(json.loads(content)["n"])
    return found


def _check_listener(listener: Listener, committed: Sequence[tuple[int, str]]) -> None:
    assert listener.told() == committed
    for name in {name for _, name in committed}:
        assert listener.seen.ids(name, STREAM) == [
            stream_id for stream_id, writer in committed if writer == name
        ]


@pytest.mark.timeout(400)
async def test_every_fact_is_seen_exactly_once(dsn: str) -> None:
    rng, sent = random.Random(1), SentMessages()
    async with AsyncExitStack() as stack:
        admin = await asyncpg.connect(dsn)
        stack.push_async_callback(admin.close)
        await admin.execute(SLOW_AND_FAILING)
        redis = await stack.enter_async_context(RedisServer())
        postgres = await stack.enter_async_context(Proxy(unix_socket_of(dsn)))

        async def opened(name: str, dsn: str = dsn) -> Store:
            return await stack.enter_async_context(
                storage.open(dsn, server_name="s1.test", instance_name=name, config=CONFIG)
            )

        reader = await opened("reader")
        polled, linear, naive = Seen(reader.streams), LinearReader(reader), NaiveReader()
        tcp, over_redis, proxy = await _listen(stack, dsn, await opened("hub"), redis, rng)
        stores = [
            await opened(f"w{number}", through(dsn, postgres.port)) for number in range(WRITERS)
        ]
        for store in stores:
            await stack.enter_async_context(
                ReplicationPeer(store, RedisTransport(redis.url, "s1.test"), follows=False)
            )
        work = asyncio.gather(
            *(_write(store, sent, random.Random(number)) for number, store in enumerate(stores)),
            *(
                _kill_and_restart(dsn, f"p{number}", redis.url, sent, random.Random(number))
                for number in range(PROCESSES)
            ),
            _restart(redis),
        )
        await asyncio.gather(
            work, naive.read(dsn, work), _read_and_cut(linear, admin, postgres, work, rng)
        )
        proxy.cut_after = None
        committed = [(row[0], row[1]) for row in await admin.fetch(COMMITTED)]
        while linear.at < committed[-1][0]:
            await follow_once(reader.database, reader.streams)
            await linear.read()
        for name, last in {name: stream_id for stream_id, name in committed}.items():
            for seen in (polled, tcp.seen, over_redis.seen):
                await seen.reached(name, last, STREAM)
        found = await _numbers(admin)
    assert len({name for _, name in committed}) == WRITERS + PROCESSES
    sent.check(found)
    assert linear.seen == [stream_id for stream_id, _ in committed]
    for name in found:
        assert polled.ids(name, STREAM) == [
            stream_id for stream_id, writer in committed if writer == name
        ]
    _check_listener(tcp, committed)
    _check_listener(over_redis, committed)
    assert proxy.connections > 5
    assert naive.seen != linear.seen, "the load was too easy: the naive reader missed nothing"
    assert set(naive.seen) < set(linear.seen)
