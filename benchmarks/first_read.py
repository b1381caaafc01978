"""The first page, sync and append of a new process, with and without statements prepared ahead.

  python -m benchmarks first_read

Each round starts new processes in turn: one that prepares nothing, one that makes its first calls
as soon as `open` returns, and one that makes them when its statements are prepared. Each has its
first page, its first incremental sync and its first append, and then the same calls again. The
database has 40 small rooms and is analysed. The time of `open` and of the imports is beside them.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any, Final

import asyncpg

import storage
from benchmarks.harness import Bench, spread
from storage.testing import SHAPES, generate_room

SERVER: Final = "s1.test"
SEED: Final = 7_000
BASE_EVENTS: Final = 130
BATCH: Final = 65
MODES: Final = ("not prepared", "at once", "prepared")
SQL_READER: Final = """
SELECT p.name, r.room_id
FROM memberships m
JOIN principals p USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE m.membership = 5
ORDER BY m.room_nid DESC, m.principal_nid
LIMIT 1
"""


async def run(bench: Bench) -> None:
    """Measure the three kinds of process in turns."""
    if bench.profile:
        return
    rounds = bench.size(9, 1)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    async with bench.database() as dsn:
        asked, pdus = await _stored(dsn, bench.size(40, 4), len(MODES) * rounds)
        for number in range(rounds):
            shift = number % len(MODES)
            for mode in (*MODES[shift:], *MODES[:shift]):
                asked["since"], times = await _process({**asked, "mode": mode, "pdu": pdus.pop()})
                found[mode].append(times)
    bench.results = {
        mode: {name: spread([one[name] for one in each], digits=2) for name in each[0]}
        for mode, each in found.items()
    }


async def _stored(dsn: str, rooms: int, spare: int) -> tuple[dict[str, Any], list[str]]:
    """Store the rooms; return a reader, its last room and token, and events to append."""
    pdus: list[str] = []
    async with storage.open(dsn, server_name=SERVER) as store:
        for seed in range(rooms):
            events = BASE_EVENTS + -(-spare // rooms)
            room = [e.pdu for e in generate_room(SHAPES["small_chat"], events, seed=SEED + seed)]
            for at in range(0, BASE_EVENTS, BATCH):
                await store.append(room[at : min(at + BATCH, BASE_EVENTS)])
            pdus += [pdu.decode() for pdu in reversed(room[BASE_EVENTS:])]
        connection = await asyncpg.connect(dsn)
        user_id, room_id = await connection.fetchrow(SQL_READER)
        since = (await store.sync(user_id)).next_batch
    await connection.execute("VACUUM ANALYZE")
    await connection.close()
    return {"dsn": dsn, "user": user_id, "room": room_id, "since": since}, pdus


async def _process(request: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """Return the token and the milliseconds of a new process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.first_read"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "STORAGE_PREPARE_AHEAD": str(request["mode"] != MODES[0])},
    )
    answer, _ = await process.communicate(json.dumps(request).encode())
    if process.returncode:
        raise RuntimeError(f"a process ended with {process.returncode}")
    since, times = json.loads(answer)
    return since, times


# ------------------------------------------------------------------------------------------------
# the new process


async def read(request: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """Open a store and make the calls; return a token for the next process, and milliseconds."""
    times: dict[str, float] = {}
    since = request["since"]

    def note(name: str, start: float) -> float:
        end = time.perf_counter()
        times[name] = (end - start) * 1_000
        return end

    start = time.perf_counter()
    async with storage.open(request["dsn"], server_name=SERVER) as store:
        start = note("open", start)
        if request["mode"] == "prepared":
            await store.database.prepared.done()
        start = note("until prepared", start)
        for again in ("", " again"):
            await store.messages(request["room"], request["user"], limit=100)
            start = note(f"page{again}", start)
            since = (await store.sync(request["user"], since=since)).next_batch
            start = note(f"sync{again}", start)
            await store.append([request["pdu"].encode()])
            start = note(f"append{again}", start)
    return since, times


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(read(json.loads(sys.stdin.read())))))
