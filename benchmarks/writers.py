"""Several concurrent writers: their rate, and the delay of the linear position.

The delay is measured with one busy writer among idle ones. Each process has 16 separate rooms, and
a client for each. All begin at once, and the rate is that of all events until the last is done.
With few cores they share them, with each other and with Postgres: then the cost of concurrent
writing grows, not the rate.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import storage
from benchmarks.harness import Bench, percentiles, show, spread
from storage.streams.feed import Advance
from storage.testing import SHAPES, generate_room

SEED: Final = 9_000
ROOMS: Final = 16
BASE_EVENTS: Final = 60
WRITERS: Final = (1, 2, 4, 8)
IDLE: Final = 9


async def run(bench: Bench) -> None:
    """Measure rates by the number of writers, then the delay of the linear position."""
    if bench.profile:
        return
    for writers in WRITERS:
        rates = [await _together(bench, writers) for _ in range(bench.size(3, 1))]
        bench.results[f"{writers} writers"] = {"events_per_second": spread(rates)}
    bench.results["linear position"] = {
        "behind_ms": percentiles(await _behind(bench), factor=1_000)
    }
    bench.write()
    rows = [
        [name, *one["events_per_second"].values()]
        for name, one in bench.results.items()
        if "events_per_second" in one
    ]
    show("events per second, all writers together", ["writers", "median", "min", "max"], rows)
    behind = bench.results["linear position"]["behind_ms"]
    show(
        "milliseconds until the linear position has followed one busy writer"
        f" among {IDLE} idle ones",
        list(behind),
        [list(behind.values())],
    )


async def _together(bench: Bench, writers: int) -> float:
    """Return events per second of so many processes."""
    events = bench.size(8_192, 1_024) // writers
    async with bench.database() as dsn:
        processes = [await _process(dsn, number, events) for number in range(writers)]
        for process in processes:
            await _hear(process, "ready")
        start = time.perf_counter()
        for process in processes:
            _pipe(process.stdin).write(b"go\n")
        for process in processes:
            await _hear(process, "done")
        took = time.perf_counter() - start
        for process in processes:
            await process.communicate()
    return events * writers / took


async def _process(dsn: str, number: int, events: int) -> asyncio.subprocess.Process:
    arguments = ["-m", "benchmarks.writers", dsn, str(number), str(events)]
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )


async def _hear(process: asyncio.subprocess.Process, word: str) -> None:
    heard = (await _pipe(process.stdout).readline()).decode().strip()
    if heard != word:
        raise RuntimeError(f"a writer said {heard!r} instead of {word!r}")


def _pipe(end: Any) -> Any:
    if end is None:
        raise RuntimeError("a writer has no pipe")
    return end


async def _behind(bench: Bench) -> list[float]:
    """Return the delay of the linear position after appends, in seconds.

    It ends when the writer and an idle process know that no lower position can come.
    """
    appends = bench.size(100, 5)
    room = [
        event.pdu for event in generate_room(SHAPES["small_chat"], BASE_EVENTS + appends, seed=SEED)
    ]
    seconds = []
    async with bench.database() as dsn, AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(
                storage.open(dsn, server_name="s1.test", instance_name=f"w{number}")
            )
            for number in range(1 + IDLE)
        ]
        await stores[0].append(room[:BASE_EVENTS])
        for pdu in room[BASE_EVENTS:]:
            [result] = await stores[0].append([pdu])
            start = time.perf_counter()
            for store in (stores[0], stores[-1]):
                await _linear(store, result.stream_ordering or 0)
            seconds.append(time.perf_counter() - start)
    return seconds


async def _linear(store: storage.Store, position: int) -> None:
    """Wait until the linear position is reached."""
    moved = asyncio.Event()

    def told(_: Advance) -> None:
        moved.set()

    end = store.streams.feed.subscribe(told)
    while store.streams["events"].linear() < position:
        moved.clear()
        await moved.wait()
    end()


# ------------------------------------------------------------------------------------------------
# one of the writers


async def write(dsn: str, number: int, events: int) -> None:
    """Prepare, report it, wait for the start, append, report it."""
    each = events // ROOMS
    rooms = [
        [
            event.pdu
            for event in generate_room(
                SHAPES["small_chat"], BASE_EVENTS + each, seed=SEED + ROOMS * number + room
            )
        ]
        for room in range(ROOMS)
    ]
    async with storage.open(dsn, server_name="s1.test", instance_name=f"w{number}") as store:
        for room in rooms:
            await store.append(room[:BASE_EVENTS])
        _say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(*(_append_all(store, room[BASE_EVENTS:]) for room in rooms))
        _say("done")


async def _append_all(store: storage.Store, pdus: Sequence[bytes]) -> None:
    for pdu in pdus:
        [result] = await store.append([pdu])
        if result.outcome not in {"stored", "soft_failed"}:
            raise RuntimeError(f"not stored: {result}")


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
