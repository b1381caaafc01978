"""Replication: rows per second through one TCP connection, and the time from commit to wake-up.

The wake-up is measured within the process and over TCP. Rows are those of the stream "events", sent
by one store and received by another. Both run in this process, so one core does the work of two.
The wake-up is that of a reader of the feed. Its clock starts when the last statement of the append,
which commits, has returned.
"""

import asyncio
import time
from statistics import median
from typing import Any, Final

import storage
from benchmarks.harness import Bench, percentiles, spent, spread
from storage.replication import Client, Server
from storage.streams.feed import Advance, StreamRow
from storage.testing import SHAPES, generate_room

ROOM_EVENTS: Final = 60  # stored before the measurement
SEED: Final = 9_000
COMMIT_SIZES: Final = (1, 10, 100)


async def run(bench: Bench) -> None:
    """Measure throughput by facts per commit, then latency."""
    for size in COMMIT_SIZES:
        await _throughput(bench, size)
    if not bench.profile:
        await _latency(bench)


class FeedArrival:
    """Signals when a store's feed has passed a position."""

    def __init__(self, store: storage.Store) -> None:
        self.at = 0.0
        self.facts = 0
        self._target = 0
        self._reached = asyncio.Event()
        store.streams.feed.subscribe(self._told)

    def expect(self, position: int) -> None:
        """Set the position before it can come."""
        self._target = position
        self._reached.clear()

    async def wait(self) -> None:
        """Wait until it has come."""
        await self._reached.wait()

    def _told(self, advance: Advance) -> None:
        if advance.stream_name == "events":
            self.facts += len(advance.rows)
            if advance.current >= self._target and advance.rows:
                self.at = time.perf_counter()
                self._reached.set()


class Committed:
    """An observer that records when the last statement returned."""

    at = 0.0

    def before(self, statement: str) -> None:
        """See `storage.database.connection.Observer`."""

    def after(
        self,
        statement: str,  # noqa: ARG002  # the observer's interface
        seconds: float,  # noqa: ARG002
    ) -> None:
        self.at = time.perf_counter()


def _row(number: int) -> list[Any]:
    return [
        f"${number:043d}",
        "!AFDCvgApUmpdfVjIXmAFDCvgApUmpdfVjIXm:s1.test",
        "m.room.message",
        None,
        None,
    ]


async def _throughput(bench: Bench, size: int) -> None:
    """Advance by ``size`` facts each, as fast as the reader receives them."""
    facts, rounds = bench.size(100_000, 5_000), 1 if bench.profile else bench.size(5, 1)
    async with (
        bench.database() as dsn,
        storage.open(
            dsn,
            server_name="s1.test",
            instance_name="main",
            config=storage.Config(follow_ms=3_600_000),
        ) as main,
        storage.open(
            dsn,
            server_name="s1.test",
            instance_name="worker",
            config=storage.Config(follow_ms=3_600_000),
        ) as worker,
        await Server(main).serve() as server,
        Client(worker, "127.0.0.1", server.port) as client,
    ):
        await client.connected()
        arrival = FeedArrival(worker)
        await _say(main, arrival, 1, 1)
        rates, python = [], []
        for _ in range(rounds):
            if bench.profile:
                with bench.profiled(f"{size} facts a commit", facts):
                    await _say(main, arrival, facts, size)
                return
            with spent(bench.server) as took:
                await _say(main, arrival, facts, size)
            rates.append(facts / took.clock)
            python.append(took.python / facts * 1e6)
        bench.results[f"rdata, {size} a commit"] = {
            "rdata_per_second": spread(rates),
            "python_us_per_row": spread(python),
            "rdata_per_core_second": round(1e6 / median(python)),
        }


async def _say(main: storage.Store, arrival: FeedArrival, facts: int, size: int) -> None:
    """Advance the stream by a number of facts, and wait until the reader has them."""
    start = main.streams["events"].positions()["main"]
    rows = [
        StreamRow(number, "main", _row(number)) for number in range(start + 1, start + facts + 1)
    ]
    arrival.expect(start + facts)
    for at in range(0, facts, size):
        part = rows[at : at + size]
        main.streams.advance("events", "main", part[-1].stream_id, part)
        if at % 2_000 < size:
            await asyncio.sleep(0)  # as a writer awaits its commits
    await arrival.wait()


async def _latency(bench: Bench) -> None:
    """Append events in turn, and measure when the feeds of this store and another have them."""
    appends = bench.size(2_000, 100)
    room = list(generate_room(SHAPES["small_chat"], ROOM_EVENTS + appends, seed=SEED))
    committed = Committed()
    config = storage.Config(follow_ms=3_600_000)
    async with (
        bench.database() as dsn,
        storage.open(
            dsn, server_name="s1.test", instance_name="main", config=config, observer=committed
        ) as main,
        storage.open(dsn, server_name="s1.test", instance_name="worker", config=config) as worker,
        await Server(main).serve() as server,
        Client(worker, "127.0.0.1", server.port) as client,
    ):
        await client.connected()
        await main.append([event.pdu for event in room[:ROOM_EVENTS]])
        here, there = FeedArrival(main), FeedArrival(worker)
        local, remote, whole = [], [], []
        for event in room[ROOM_EVENTS:]:
            position = main.streams["events"].positions()["main"] + 1
            here.expect(position)
            there.expect(position)
            start = time.perf_counter()
            [result] = await main.append([event.pdu])
            at = committed.at
            if result.stream_ordering is None:
                continue
            await here.wait()
            await there.wait()
            local.append(here.at - at)
            remote.append(there.at - at)
            whole.append(there.at - start)
        bench.results["commit to wake-up"] = {
            "in_process_ms": percentiles(local, factor=1_000),
            "over_tcp_ms": percentiles(remote, factor=1_000),
            "append_to_wake_up_over_tcp_ms": percentiles(whole, factor=1_000),
        }
