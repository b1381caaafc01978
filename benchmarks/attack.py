"""The cost of a room whose state must be resolved at every event, and its effect on other rooms.

A remote admin can create such a room. Chains: two branches of power levels, each event citing the
one before it. Bans: twenty branches that ban different members. Both arrive in transactions of
fifty PDUs. Meanwhile a message is appended to another room and its user syncs, repeatedly.

Two clocks measure how long the event loop is blocked: the wall clock, and its thread's CPU time. If
the first is far ahead, other processes had the CPUs. CPU is that of this process alone, in a run
without other work: per event of the last transactions, when the chains are longest. The input is
kept out of Python's garbage collection, whose full runs would block longest.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import storage
from benchmarks.harness import Bench, percentiles, show
from storage import Store
from storage.testing import RoomBuilder

CHAINS: Final = (100, 300, 1_000)
BANS: Final = (100, 300, 1_000)
QUICK: Final = (20, 60)
FORKS: Final = 20
TOGETHER: Final = 50  # PDUs in a transaction
LAST: Final = 4  # transactions at the end whose CPU is counted
PAUSE: Final = 0.005  # seconds between two appends, or syncs, of the other room
SERVER: Final = "s1.test"
REMOTE: Final = "@admin:s2.test"
LOCAL: Final = f"@local:{SERVER}"


class Others:
    """Another room: seconds of its appends and syncs, the longest block, and the longest work."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.room = RoomBuilder("11", seed=7, sign=False)
        self.appends: list[float] = []
        self.syncs: list[float] = []
        self.standstill = 0.0
        self.busy = 0.0
        self.over = False

    async def begin(self) -> None:
        """Create the room, with its user."""
        self.room.start(LOCAL)
        await self.store.append(self.room.pdus, room_version="11")
        self.since = (await self.store.sync(LOCAL)).next_batch

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Run the appends, the syncs and the clocks while the block runs."""
        self.appends, self.syncs, self.standstill, self.busy, self.over = [], [], 0.0, 0.0, False
        async with asyncio.TaskGroup() as group:
            for one in (self._append, self._sync, self._tick):
                group.create_task(one())
            yield
            self.over = True

    def seen(self) -> dict[str, Any]:
        """Return the figures of the last block, in milliseconds."""
        return {
            "append ms": percentiles(self.appends, factor=1000),
            "sync ms": percentiles(self.syncs, factor=1000),
            "standstill ms": round(self.standstill * 1000, 1),
            "busy ms": round(self.busy * 1000, 1),
        }

    async def _append(self) -> None:
        while not self.over:
            self.appends.append(
                await _timed(self.store.append([self.room.message(LOCAL, "hello").pdu]))
            )
            await asyncio.sleep(PAUSE)

    async def _sync(self) -> None:
        while not self.over:
            self.syncs.append(await _timed(self._sync_once()))
            await asyncio.sleep(PAUSE)

    async def _sync_once(self) -> None:
        self.since = (await self.store.sync(LOCAL, since=self.since)).next_batch

    async def _tick(self) -> None:
        before, worked = time.perf_counter(), time.thread_time()
        while not self.over:
            await asyncio.sleep(0.001)
            now, work = time.perf_counter(), time.thread_time()
            self.standstill = max(self.standstill, now - before - 0.001)
            self.busy = max(self.busy, work - worked)
            before, worked = now, work


async def _timed(call: Awaitable[Any]) -> float:
    start = time.perf_counter()
    await call
    return time.perf_counter() - start


def chains(
    length: int, *, seed: int = 1, joined: Sequence[str] = ()
) -> tuple[list[bytes], list[bytes]]:
    """Return the start of a room with these members, and two chains of power levels, in turn."""
    room = _room(seed, joined)
    first, second = room.fork(2)
    beginning = len(room.events)
    for number in range(length):
        for branch in (first, second):
            branch.power_levels(REMOTE, users={"@x:s2.test": number % 50})
    return room.pdus[:beginning], room.pdus[beginning:]


def bans(
    length: int, *, seed: int = 1, joined: Sequence[str] = ()
) -> tuple[list[bytes], list[bytes]]:
    """Return the start of a room with these members, and bans on twenty branches, in turn."""
    room = _room(seed, joined)
    for number in range(length):
        room.join(f"@m{number}:s2.test")
    branches = room.fork(FORKS)
    beginning = len(room.events)
    for number in range(length):
        branches[number % FORKS].ban(REMOTE, f"@m{number}:s2.test")
    return room.pdus[:beginning], room.pdus[beginning:]


def _room(seed: int, joined: Sequence[str]) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed, sign=False, exact=False)
    room.start(REMOTE)
    for user_id in joined:
        room.join(user_id)
    return room


ATTACKS: Final[
    dict[str, tuple[Callable[..., tuple[list[bytes], list[bytes]]], tuple[int, ...]]]
] = {
    "chains": (chains, CHAINS),
    "bans": (bans, BANS),
}


async def run(bench: Bench) -> None:
    """Measure each attack at each length."""
    for name, (make, full) in ATTACKS.items():
        lengths = QUICK if bench.quick else full
        for length in lengths:
            beginning, attack = make(length)
            found = await _watched(bench, beginning, attack)
            found["CPU ms per event"] = await _alone(bench, beginning, attack)
            bench.results[f"{name} of {length}"] = found
        first, *_, last = (
            bench.results[f"{name} of {length}"]["CPU ms per event"] for length in lengths
        )
        bench.results[f"CPU of {name} grown by"] = round(last / first, 2)
    _show(bench)
    bench.write()


async def _watched(
    bench: Bench, beginning: Sequence[bytes], attack: Sequence[bytes]
) -> dict[str, Any]:
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        others = Others(store)
        await others.begin()
        await store.append(beginning, room_version="11")
        gc.collect()
        gc.freeze()
        async with others.at_work():
            await asyncio.sleep(bench.size(5, 1))
        quiet = others.seen()
        async with others.at_work():
            start = time.perf_counter()
            await _send(store, attack)
            seconds = time.perf_counter() - start
        return {
            "quiet": quiet,
            "attacked": others.seen(),
            "attack ms per event": round(seconds / len(attack) * 1000, 3),
        }


async def _alone(bench: Bench, beginning: Sequence[bytes], attack: Sequence[bytes]) -> float:
    """Return milliseconds of CPU for each event of the last transactions."""
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        await store.append(beginning, room_version="11")
        last = attack[-LAST * TOGETHER :]
        await _send(store, attack[: -len(last)])
        start = time.process_time()
        await _send(store, last)
        return round((time.process_time() - start) / len(last) * 1000, 3)


async def _send(store: Store, pdus: Sequence[bytes]) -> None:
    for at in range(0, len(pdus), TOGETHER):
        for result in await store.append(pdus[at : at + TOGETHER]):
            if result.outcome not in ("stored", "soft_failed"):
                raise AssertionError(result)


def _show(bench: Bench) -> None:
    columns = [
        "attack",
        "standstill ms",
        "busy ms",
        "append p50",
        "p99",
        "quiet p99",
        "sync p99",
        "quiet p99",
        "CPU ms per event",
        "ms per event",
    ]
    rows = []
    for name, found in bench.results.items():
        if isinstance(found, float):
            rows.append([name, *[""] * 7, found, ""])
            continue
        quiet, attacked = found["quiet"], found["attacked"]
        times = [
            attacked["append ms"]["p50"],
            attacked["append ms"]["p99"],
            quiet["append ms"]["p99"],
        ]
        times += [attacked["sync ms"]["p99"], quiet["sync ms"]["p99"]]
        rows.append(
            [
                name,
                attacked["standstill ms"],
                attacked["busy ms"],
                *times,
                found["CPU ms per event"],
                found["attack ms per event"],
            ]
        )
    show("Another room while one is attacked", columns, rows)
