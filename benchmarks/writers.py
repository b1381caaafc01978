"""Several writer processes: their rate together, and the delay of the linear position.

A room belongs to the process that a hash of its id names (`owner`), as docs/how-to/many-writers.md
recommends. Each process appends the events of its rooms, one at a time with a client for each room,
or in batches of one room. All begin at once, and the rate is that of all events until the last is
done. The rooms are chosen so that each process has as many. "cores" is the processor time of the
writers and of Postgres by the clock: where it reaches the number of cores, the machine is the
limit. The delay is measured with one busy writer among idle ones.
"""

import asyncio
import json
import sys
import tempfile
import time
import zlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import storage
from benchmarks.harness import Bench, append_all, percentiles, spent, spread
from storage.streams.feed import Advance
from storage.testing import SHAPES, generate_room

SEED: Final = 9_000
ROOMS: Final = 32
BASE_EVENTS: Final = 60
WRITERS: Final = (1, 2, 4)
BATCHES: Final = (1, 100)
IDLE: Final = 9


class WritersRound(NamedTuple):
    """Events per second of all writers, and cores used by them, by backends, by the server."""

    rate: float
    python: float
    backends: float
    background: float


def owner(room_id: str, writers: int) -> int:
    """Return the number of the process that writes to a room."""
    return zlib.crc32(room_id.encode()) % writers


async def run(bench: Bench) -> None:
    """Measure rates by the number of writers, then the delay of the linear position."""
    if bench.profile:
        return
    with tempfile.TemporaryDirectory() as folder:
        rooms = Path(folder) / "rooms.json"
        rooms.write_text(json.dumps(_rooms(bench.size(1_000, 20))))
        for batch in BATCHES:
            await _rates(bench, rooms, batch)
    bench.results["linear position"] = {
        "behind_ms": percentiles(await _behind(bench), factor=1_000)
    }


async def _rates(bench: Bench, rooms: Path, batch: int) -> None:
    """Measure all numbers of writers in turns; ratios are of one round."""
    rounds: list[dict[int, WritersRound]] = []
    for number in range(bench.size(3, 1)):
        order = WRITERS if number % 2 else WRITERS[::-1]
        rounds.append({writers: await _together(bench, writers, rooms, batch) for writers in order})
    what, told = "one at a time" if batch == 1 else f"batches of {batch}", dict[str, Any]()
    for writers in WRITERS:
        each = [one[writers] for one in rounds]
        told[f"{writers} writers"] = {
            "events_per_second": spread([one.rate for one in each]),
            "of_one_writer": spread([one[writers].rate / one[1].rate for one in rounds], digits=2),
            "cores_python": spread([one.python for one in each], digits=3),
            "cores_backends": spread([one.backends for one in each], digits=3),
            "cores_background": spread([one.background for one in each], digits=3),
        }
    bench.results[what] = told
    bench.write()


def _rooms(events: int) -> list[list[str]]:
    """Return rooms with so many events after their base; each process gets as many rooms."""
    rooms: list[list[str]] = []
    left = dict.fromkeys(range(max(WRITERS)), ROOMS // max(WRITERS))
    seed = SEED
    while len(rooms) < ROOMS:
        room = generate_room(SHAPES["small_chat"], BASE_EVENTS + events, seed=seed)
        seed += 1
        if left[whose := owner(room.room_id, max(WRITERS))]:
            left[whose] -= 1
            rooms.append([event.pdu.decode() for event in room])
    return rooms


async def _together(bench: Bench, writers: int, rooms: Path, batch: int) -> WritersRound:
    """Return the rate of so many processes."""
    async with bench.database() as dsn:
        started = [
            await _process(dsn, f"{number}/{writers}", str(rooms), str(batch))
            for number in range(writers)
        ]
        for process in started:
            await _hear(process, "ready")
        with spent(bench.server) as used:
            for process in started:
                _pipe(process.stdin).write(b"go\n")
            said = [await _hear(process, "done") for process in started]
        for process in started:
            _pipe(process.stdin).close()  # `communicate` leaves it open up to Python 3.11
            await process.wait()
    events, seconds = sum(float(one[0]) for one in said), sum(float(one[1]) for one in said)
    clock = used.clock
    return WritersRound(
        events / clock, seconds / clock, used.backends / clock, used.background / clock
    )


async def _process(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.writers", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def _hear(process: asyncio.subprocess.Process, word: str) -> list[str]:
    line: bytes = await _pipe(process.stdout).readline()
    heard = line.decode().split()
    if heard[:1] != [word]:
        raise RuntimeError(f"a writer said {heard} instead of {word!r}")
    return heard[1:]


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


def own_rooms(number: int, writers: int, file: str) -> list[list[bytes]]:
    """Return the rooms of one of the processes."""
    rooms = json.loads(Path(file).read_text())
    return [
        [pdu.encode() for pdu in room]
        for room in rooms
        if owner(json.loads(room[0])["room_id"], writers) == number
    ]


async def write(dsn: str, number: int, own: list[list[bytes]], batch: int) -> None:
    """Store the bases of this process' rooms, report it, wait for the start, append, report it."""
    async with storage.open(dsn, server_name="s1.test", instance_name=f"w{number}") as store:
        for room in own:
            await store.append(room[:BASE_EVENTS])
        await store.database.prepared.done()
        _say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        began = time.process_time()
        rests = [room[BASE_EVENTS:] for room in own]
        await asyncio.gather(*(append_all(store, rest, batch) for rest in rests))
        _say(f"done {sum(map(len, rests))} {time.process_time() - began}")
        await asyncio.to_thread(sys.stdin.readline)  # until the backends have been looked at


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    which, all_of = map(int, sys.argv[2].split("/"))
    asyncio.run(write(sys.argv[1], which, own_rooms(which, all_of, sys.argv[3]), int(sys.argv[4])))
