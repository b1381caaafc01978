"""Reads of one primary with a standby, against the primary alone, on one machine.

Two processes read at once, with eight clients each, in turns from the primary alone and with a
standby. Both servers and the readers share the cores. So the rate says what the routing costs, and
the processor time of the primary says how much it is relieved. Latencies are those of one client: a
read with a token that the standby has replayed, and a read right after a write of its process.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import storage
from benchmarks.harness import SERVER_CONFIG, Bench, Spent, percentiles, show, spent, spread
from storage import Store
from storage.ids import RoomId
from storage.testing import SHAPES, RoomBuilder, build_room
from tests.failover import ReplicatedPair

PROCESSES: Final = 2
CLIENTS: Final = 8
ROUNDS: Final = 5
SERVER: Final = "s1.test"
SHARED_BUFFERS_MB: Final = 256
ALONE, BESIDE = "the primary alone", "with a standby"

Call = Callable[[], Awaitable[Any]]


@dataclass(slots=True)
class StandbyLoad:
    """The two servers, and the room that is read."""

    pair: ReplicatedPair
    room: RoomBuilder
    user: str
    token: str

    def arguments(self, where: str) -> dict[str, Any]:
        """Return the arguments of `storage.open` for a reader."""
        replica = None if where == ALONE else self.pair.rooms(self.pair.standby)
        return {"dsn": self.pair.rooms(self.pair.primary), "replica_dsn": replica}


async def run(bench: Bench) -> None:
    """Measure the rates in turns, then the latencies in turns."""
    if bench.profile:
        return
    room = build_room(SHAPES["small_chat"], bench.size(5_000, 300), seed=5, exact=False)
    config = replace(SERVER_CONFIG, embedded_shared_buffers_mb=SHARED_BUFFERS_MB)
    async with (
        ReplicatedPair(config) as pair,
        storage.open(pair.rooms(pair.primary), server_name=SERVER) as store,
    ):
        await store.append(room.pdus)
        users = sorted(await store.member_ids(RoomId(room.room_id)))
        user = next(one for one in users if one.endswith(SERVER))
        load = StandbyLoad(pair, room, user, (await store.sync(user)).next_batch)
        async with store.database.connection() as conn:
            await conn.execute("VACUUM ANALYZE")
        await pair.caught_up()
        await _rates(bench, load)
        await _latencies(bench, load)
    bench.write()


# ------------------------------------------------------------------------------------------------
# rates


async def _rates(bench: Bench, load: StandbyLoad) -> None:
    found: dict[str, list[tuple[float, Spent, int]]] = {ALONE: [], BESIDE: []}
    for _ in range(bench.size(ROUNDS, 1)):
        for where, rounds in found.items():
            rounds.append(await _together(load, where, bench.size(8, 1)))
    for where, rounds in found.items():
        reads = sum(count for _, _, count in rounds)
        bench.results[where] = {
            "reads_per_second": spread([rate for rate, _, _ in rounds]),
            "primary_us_per_read": round(sum(one.backends for _, one, _ in rounds) / reads * 1e6),
        }
    show(
        "reads of 20 messages, two processes with eight clients each",
        ["", "reads/s", "min", "max", "us of the primary per read"],
        [
            [where, *one["reads_per_second"].values(), one["primary_us_per_read"]]
            for where, one in bench.results.items()
        ],
    )


async def _together(load: StandbyLoad, where: str, seconds: int) -> tuple[float, Spent, int]:
    """Return reads per second of all processes, the time of the primary, and the reads."""
    given = json.dumps(
        {
            "opening": load.arguments(where),
            "room": load.room.room_id,
            "user": load.user,
            "token": load.token,
            "seconds": seconds,
        }
    )
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.standby", given, f"reader{number}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for number in range(PROCESSES)
    ]
    await asyncio.gather(*map(_heard, processes))
    with spent(load.pair.primary) as cost:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        found = [json.loads(line) for line in await asyncio.gather(*map(_heard, processes))]
    for process in processes:
        await process.communicate(b"end\n")
    reads = sum(one["reads"] for one in found)
    if where == BESIDE:
        assert sum(one["standby"] for one in found) == reads
    return reads / seconds, cost, reads


async def _heard(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


async def read_for_a_while(given: dict[str, Any], name: str) -> None:
    """Read with eight clients for some seconds, in a process of its own."""
    opening = given["opening"]
    dsn = opening.pop("dsn")
    async with storage.open(dsn, server_name=SERVER, instance_name=name, **opening) as store:
        read = _page(store, given["room"], given["user"], given["token"])
        for _ in range(50):
            await read()
        store.measures.replica_reads.clear()
        print("ready", flush=True)  # the answer to the benchmark
        await asyncio.to_thread(sys.stdin.readline)
        end = time.perf_counter() + given["seconds"]

        async def client() -> int:
            count = 0
            while time.perf_counter() < end:
                await read()
                count += 1
            return count

        reads = sum(await asyncio.gather(*(client() for _ in range(CLIENTS))))
        standby = store.measures.replica_reads["standby"]
        print(json.dumps({"reads": reads, "standby": standby}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # until the time of the servers is taken


def _page(store: Store, room_id: str, user: str, token: str) -> Call:
    return lambda: store.messages(RoomId(room_id), user, from_=token, limit=20)


# ------------------------------------------------------------------------------------------------
# latencies


async def _latencies(bench: Bench, load: StandbyLoad) -> None:
    covered: dict[str, list[float]] = {ALONE: [], BESIDE: []}
    after_write: dict[str, list[float]] = {ALONE: [], BESIDE: []}
    for _ in range(bench.size(3, 1)):
        for where in (ALONE, BESIDE):
            async with storage.open(
                server_name=SERVER, instance_name="latency", **load.arguments(where)
            ) as store:
                read = _page(store, load.room.room_id, load.user, load.token)
                covered[where] += await _timed(read, bench.size(1_000, 20))
                after_write[where] += await _after_writes(store, load, bench.size(200, 5))
    names = {"covered": covered, "after a write": after_write}
    for name, found in names.items():
        bench.results[name] = {
            where: {"ms": percentiles(times, factor=1_000)} for where, times in found.items()
        }
    show(
        "latency of one client, ms",
        ["", "p50", "p95", "p99", "max"],
        [
            [f"{name}, {where}", *bench.results[name][where]["ms"].values()]
            for name in names
            for where in (ALONE, BESIDE)
        ],
    )


async def _timed(read: Call, count: int) -> list[float]:
    for _ in range(20):
        await read()
    found = []
    for _ in range(count):
        began = time.perf_counter()
        await read()
        found.append(time.perf_counter() - began)
    return found


async def _after_writes(store: Store, load: StandbyLoad, count: int) -> Sequence[float]:
    """Return the times of reads, each right after an event was stored by the same process."""
    found = []
    for number in range(count):
        event = load.room.message(load.user, f"{number}")
        await store.append([event.pdu])
        began = time.perf_counter()
        page = await store.messages(load.room.room_id, load.user, limit=20)
        found.append(time.perf_counter() - began)
        assert page.chunk[0].event_id == event.event_id
    return found


if __name__ == "__main__":
    asyncio.run(read_for_a_while(json.loads(sys.argv[1]), sys.argv[2]))
