"""The cost of a room whose state must be resolved at every event, and its effect on other rooms.

A remote admin can create such a room. Chains: two branches of power levels, each event citing the
one before it. Bans: twenty branches that ban different members. Both arrive in transactions of
fifty PDUs. Meanwhile a message is appended to another room and its user syncs, repeatedly.

"busy" is for how long the event loop is blocked, in CPU time. CPU is that of this process alone, in
a run without other work: per event of the last transactions, when the chains are longest. The input
is kept out of Python's garbage collection, whose full runs would block longest.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import storage
from benchmarks.harness import Bench, Heartbeat, append_all, percentiles
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
    """Another room, to which a message is appended while its user syncs."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.room = RoomBuilder("11", seed=7, sign=False)

    async def begin(self) -> None:
        """Create the room, with its user."""
        self.room.start(LOCAL)
        await self.store.append(self.room.pdus, room_version="11")
        self.since = (await self.store.sync(LOCAL)).next_batch

    async def beside(self, work: Coroutine[Any, Any, None]) -> dict[str, Any]:
        """Append and sync while the work runs; return milliseconds, and the longest work."""
        appends: list[float] = []
        syncs: list[float] = []
        async with Heartbeat() as heart, asyncio.TaskGroup() as group:
            task = group.create_task(work)
            while not task.done():
                start = time.perf_counter()
                await self.store.append([self.room.message(LOCAL, "hello").pdu])
                stored = time.perf_counter()
                self.since = (await self.store.sync(LOCAL, since=self.since)).next_batch
                appends.append(stored - start)
                syncs.append(time.perf_counter() - stored)
                await asyncio.sleep(PAUSE)
        return {
            "append ms": percentiles(appends, factor=1000),
            "sync ms": percentiles(syncs, factor=1000),
            "busy ms": heart.longest_ms,
        }


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


async def _watched(
    bench: Bench, beginning: Sequence[bytes], attack: Sequence[bytes]
) -> dict[str, Any]:
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        others = Others(store)
        await others.begin()
        await store.append(beginning, room_version="11")
        gc.collect()
        gc.freeze()
        return {
            "quiet": await others.beside(asyncio.sleep(bench.size(5, 1))),
            "attacked": await others.beside(append_all(store, attack, TOGETHER)),
        }


async def _alone(bench: Bench, beginning: Sequence[bytes], attack: Sequence[bytes]) -> float:
    """Return milliseconds of CPU for each event of the last transactions."""
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        await store.append(beginning, room_version="11")
        last = attack[-LAST * TOGETHER :]
        await append_all(store, attack[: -len(last)], TOGETHER)
        start = time.process_time()
        await append_all(store, last, TOGETHER)
        return round((time.process_time() - start) / len(last) * 1000, 3)
