"""The mirror's lag while events are written, and the share of files that a day's query reads.

Lag: `room-storage spark mirror all` follows the store in a process of its own, while this one
appends at a fixed rate. The lag of an event is the time between its receipt and the commit of the
mirror's `events` that has it. Files: the events are spread over days, and the plan of a query on
one day counts the files that it reads.
"""

import asyncio
import bisect
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any, Final

import asyncpg
import pyarrow as pa
from deltalake import DeltaTable

import storage
from benchmarks.harness import Bench
from storage.pipeline import mirror, mirrored
from storage.pipeline.session import session
from storage.testing import SHAPES, GeneratedRoom, generate_room

SERVER: Final = "s1.test"
RATE: Final = 1_000
ROOMS: Final = 10
BATCH: Final = 50
"""Events of a room that are appended at once, so that the writer reaches the rate."""
DAYS: Final = 60
DAY_MS: Final = 86_400_000

Row = dict[str, Any]


async def run(bench: Bench) -> None:
    """Measure the lag, then the files of a day."""
    seconds = bench.size(60, 5)
    rooms = [
        generate_room(SHAPES["small_chat"], RATE * seconds // ROOMS, seed=seed, sign=False)
        for seed in range(ROOMS)
    ]
    with tempfile.TemporaryDirectory(prefix="room-storage-bench-") as folder:
        async with bench.database() as dsn:
            bench.results["lag"] = await _lag(dsn, Path(folder) / "followed", rooms)
            bench.results["day"] = await _day(dsn, Path(folder) / "days")


async def _lag(dsn: str, folder: Path, rooms: list[GeneratedRoom]) -> Row:
    async with storage.open(dsn, server_name=SERVER) as store:
        process = await _following(dsn, folder)
        began = time.monotonic()
        turns = max(map(len, rooms)) // BATCH
        late = 0.0
        for turn in range(turns):
            due = began + turn * BATCH * ROOMS / RATE
            late = max(late, time.monotonic() - due)
            await asyncio.sleep(max(due - time.monotonic(), 0))
            await asyncio.gather(
                *(store.append(room.pdus[turn * BATCH : (turn + 1) * BATCH]) for room in rooms)
            )
        written = time.monotonic() - began
    await _until_current(process, dsn, folder)
    process.terminate()
    await process.communicate()
    return _lags(folder) | {
        "events_per_second": round(turns * BATCH * ROOMS / written),
        "writer_late_s": round(late, 1),
    }


async def _following(dsn: str, folder: Path) -> Process:
    """Start the mirror; return once it has committed each table."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "storage",
        "spark",
        "mirror",
        "all",
        "--to",
        str(folder),
        "--dsn",
        dsn,
        "--master",
        "local[1]",
        "--conf",
        "spark.ui.showConsoleProgress=false",
        stderr=PIPE,
    )
    assert process.stderr is not None
    async for line in process.stderr:
        if line.startswith(b"rooms "):
            break
    return process


async def _until_current(process: Process, dsn: str, folder: Path) -> None:
    connection = await asyncpg.connect(dsn)
    stored = await connection.fetchval("SELECT count(*) FROM events WHERE NOT outlier")
    await connection.close()
    assert process.stderr is not None
    async for _ in process.stderr:
        if DeltaTable(folder / "events").count() >= stored:
            return


def _lags(folder: Path) -> Row:
    """Return percentiles over all events, in seconds."""
    last = DeltaTable(folder / "events")
    commits = sorted((one["version"], one["timestamp"]) for one in last.history())
    upto: list[tuple[int, int]] = []
    for version, committed in commits:
        actions = pa.table(
            DeltaTable(folder / "events", version=version).get_add_actions(flatten=True)
        )
        maxima = actions["max.arrived"].to_pylist() if actions.num_rows else []
        upto.append((max(maxima, default=0), committed))
    table = last.to_pyarrow_table(columns=["arrived", "received_ts"])
    ends = [end for end, _ in upto]
    lags = sorted(
        (upto[bisect.bisect_left(ends, arrived)][1] - received) / 1_000
        for arrived, received in zip(
            table["arrived"].to_pylist(), table["received_ts"].to_pylist(), strict=True
        )
    )
    return {
        "events": len(lags),
        "commits": len(commits),
        "median_s": round(statistics.median(lags), 2),
        "p95_s": round(lags[len(lags) * 95 // 100], 2),
        "max_s": round(lags[-1], 2),
    }


async def _day(dsn: str, folder: Path) -> Row:
    """Spread the events over days, mirror them, and count the files that a day's query reads."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        "UPDATE events SET received_ts = received_ts - (event_nid % $1::int) * $2::bigint",
        DAYS,
        DAY_MS,
    )
    await connection.close()
    return await asyncio.to_thread(_files_read, dsn, folder)


def _files_read(dsn: str, folder: Path) -> Row:
    with session("local[1]", {"spark.ui.showConsoleProgress": "false"}) as spark:
        mirror(spark, dsn, str(folder), ("events",), once=True)
        events = mirrored(spark, str(folder), "events")
        day = events.select("day").first()
        assert day is not None
        one = events.where(events.day == day["day"]).groupBy("type").count()
        one.collect()
        whole = events.groupBy().count()
        began = time.monotonic()
        count = whole.collect()[0]["count"]
        seconds = time.monotonic() - began
        read, files = _metric(one, "numFiles"), len(DeltaTable(folder / "events").file_uris())
        return {
            "files": files,
            "files_of_a_day": read,
            "share": round(read / files, 4),
            "events": count,
            "count_s": round(seconds, 2),
        }


def _metric(frame: Any, name: str) -> int:
    """Return a metric of the scan of files in an executed plan."""
    leaves = frame._jdf.queryExecution().executedPlan().collectLeaves()  # noqa: SLF001
    return int(leaves.head().metrics().apply(name).value())
