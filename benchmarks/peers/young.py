"""Young rooms: half of their events are state, and both processes have just begun.

Each round has new rooms, a new database and a new process on either side. A round begins when its
process is ready: here `open` has returned, there the server has started. No event was stored
before, so caches, plans and connections are those of the first minute.

This module is also the process of this side: `python -m benchmarks.peers.young DSN BATCHES`
writes the batches of a file and prints what they took.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import asyncpg
import uvloop

import storage
from benchmarks.harness import Bench, append_timed, spent
from benchmarks.peers import limits
from benchmarks.peers.process import synapse
from benchmarks.peers.writes import (
    BATCH,
    SQL_BYTES,
    SQL_WAL,
    PeerScenario,
    PeerWriteRound,
    SentRoom,
    StatementCounts,
    asked_to_persist,
    still,
    told,
)
from storage.testing import RoomBuilder

SERVER: Final = "s1.test"
EVENTS: Final = 40  # of each room
SEED: Final = 50_000
Batches = list[list[bytes]]


def scenarios(bench: Bench) -> list[PeerScenario]:
    """Return both ways of writing them."""
    rooms = bench.size(20, 2)
    return [
        PeerScenario("young rooms, one at a time", SEED, rooms, 1, 1, "single"),
        PeerScenario("young rooms, a batch for each", SEED, rooms, BATCH, 1, "linear"),
    ]


def young_room(seed: int) -> SentRoom:
    """Return a room of 40 events: creation and joins, then messages, half of each."""
    room = RoomBuilder("11", seed=seed, servers=[f"s{number}.test" for number in range(1, 9)])
    admin = room.user(1)
    room.start(admin)
    user = 2
    while len(room.events) < EVENTS // 2:
        room.join(room.user(user))
        user += 1
    for at in range(EVENTS - len(room.events)):
        room.message(room.user(1 + at % (user - 1)), f"message {at}")
    return SentRoom(room.room_id, "11", room.pdus)


async def measure(
    bench: Bench, raw: Any, scenario: PeerScenario, rounds: int, *, alone: bool = False
) -> dict[str, Any]:
    """Run rounds of both, in turn; the side that begins alternates."""
    parts, bare = list[dict[str, PeerWriteRound]](), list[float]()
    sides = {"ours": _ours} | ({} if alone else {"synapse": _theirs})
    grown = dict.fromkeys(sides, 0)
    pdus: list[bytes] = []
    for number in range(rounds):
        seed = scenario.seed + number * scenario.rooms
        rooms = [young_room(seed + at) for at in range(scenario.rooms)]
        pdus = [pdu for room in rooms for pdu in room.pdus]
        bare.append(await limits.bare_inserts(raw, [_batches(scenario, rooms)]))
        part: dict[str, PeerWriteRound] = {}
        for name in sides if number % 2 else reversed(sides):
            part[name], size = await sides[name](bench, scenario, rooms)
            grown[name] += size
        parts.append(part)
    return told(scenario, parts, bare, grown, sum(map(len, pdus)) / len(pdus))


def _batches(scenario: PeerScenario, rooms: list[SentRoom]) -> Batches:
    """Return the events of each room, one by one or together."""
    return [
        room.pdus[at : at + scenario.batch]
        for room in rooms
        for at in range(0, len(room.pdus), scenario.batch)
    ]


async def _theirs(
    bench: Bench, scenario: PeerScenario, rooms: list[SentRoom]
) -> tuple[PeerWriteRound, int]:
    async with synapse(bench.server.dsn, SERVER) as peer, _looking(peer.dsn) as look:
        for room in rooms:
            await peer.ask("room", room_id=room.room_id, room_version=room.version)
        size = int(await look.fetchval(SQL_BYTES))
        part = await asked_to_persist(bench, peer, look, [_batches(scenario, rooms)], scenario.how)
        return part, int(await look.fetchval(SQL_BYTES)) - size


async def _ours(
    bench: Bench, scenario: PeerScenario, rooms: list[SentRoom]
) -> tuple[PeerWriteRound, int]:
    async with bench.database() as dsn, _looking(dsn) as look:
        size = int(await look.fetchval(SQL_BYTES))
        with TemporaryDirectory(prefix="room-storage-bench-") as folder:
            path = Path(folder) / "batches.ndjson"
            _write(path, _batches(scenario, rooms))
            part = await _in_process(bench, look, dsn, path)
        return part, int(await look.fetchval(SQL_BYTES)) - size


@contextlib.asynccontextmanager
async def _looking(dsn: str) -> AsyncIterator[Any]:
    look = await asyncpg.connect(dsn)
    try:
        yield look
    finally:
        await look.close()


def _write(path: Path, batches: Batches) -> None:
    path.write_text(
        "".join(json.dumps([pdu.decode() for pdu in batch]) + "\n" for batch in batches)
    )


def _read(path: Path) -> Batches:
    return [[pdu.encode() for pdu in json.loads(line)] for line in path.read_text().splitlines()]


async def _in_process(bench: Bench, look: Any, dsn: str, path: Path) -> PeerWriteRound:
    """Let a new process write: it says when it is ready, and closes when its input ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, dsn, str(path)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()
    wal = await look.fetchval(SQL_WAL)
    with spent(bench.server) as used:
        process.stdin.write(b"\n")
        answer = json.loads(await process.stdout.readline())
    wal = await look.fetchval(SQL_WAL) - wal
    process.stdin.close()
    await process.wait()
    return PeerWriteRound(
        answer["events"],
        answer["seconds"],
        answer["python_seconds"],
        used.backends,
        answer["statements"],
        answer["transactions"],
        int(wal),
        answer["latencies"],
    )


# ------------------------------------------------------------------------------------------------
# the process of this side


async def _main(dsn: str, path: Path) -> None:
    batches, counts, latencies = _read(path), StatementCounts(), list[float]()
    async with storage.open(dsn, server_name=SERVER, observer=counts) as store:
        counts.opened()
        still()
        print(flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        cpu, clock = time.process_time(), time.perf_counter()
        await append_timed(store, batches, latencies)
        answer = {
            "events": sum(map(len, batches)),
            "seconds": time.perf_counter() - clock,
            "python_seconds": time.process_time() - cpu,
            "statements": counts.statements,
            "transactions": counts.transactions,
            "latencies": latencies,
        }
        print(json.dumps(answer), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], Path(sys.argv[2])))
