"""Spark against one process: the same lines, hashes and signatures checked, into the same tables; then an export and a verification.

Clock and processor time, the latter of Python, JVM and Postgres together. A session is started and warmed up by a small import first, as
what a JVM takes to start is no matter of size. Rooms are of several sizes, the largest with a third of the events.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

import storage
from benchmarks.harness import Bench, Spent, show, spent
from storage.pipeline import export_parquet, import_archive, verify
from storage.pipeline.session import session
from storage.testing import SHAPES, GeneratedRoom, generate_room, write_ndjson

SERVER: Final = "s1.test"
SHARES: Final = (0.34, 0.2, 0.16, 0.1, 0.1, 0.05, 0.05)
BATCH: Final = 1_000

Row = dict[str, Any]


async def run(bench: Bench) -> None:
    """Generate, append in one process, import on Spark with one and two executor threads, export, verify."""
    count = bench.size(100_000, 7_000)
    shape = SHAPES["small_chat"]
    rooms = [generate_room(shape, round(count * share), seed=seed) for seed, share in enumerate(SHARES)]
    rows = [await _single(bench, rooms)]
    with tempfile.TemporaryDirectory(prefix="room-storage-bench-") as folder:
        for master in ("local[1]", "local[2]"):
            async with bench.database() as dsn:
                rows += await asyncio.to_thread(_on_spark, bench, Path(folder), rooms, dsn, master)
    bench.results["rows"] = rows
    bench.write()
    columns = ["what", "events", "seconds", "events_per_second", "python_us", "spark_us", "postgres_us", "cpu_us_per_event"]
    show("pipeline", columns, [[row.get(column, "") for column in columns] for row in rows])


async def _single(bench: Bench, rooms: Sequence[GeneratedRoom]) -> Row:
    """Rooms side by side through one store, as `room-storage import` does."""
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:

        async def append(room: GeneratedRoom) -> None:
            for at in range(0, len(room), BATCH):
                await store.append(room.pdus[at : at + BATCH], verify_keys=room.keys)

        with spent(bench.server) as cost:
            await asyncio.gather(*map(append, rooms))
    return _row("one process", sum(map(len, rooms)), cost, 0.0)


def _on_spark(bench: Bench, folder: Path, rooms: Sequence[GeneratedRoom], dsn: str, master: str) -> list[Row]:
    archive, small = folder / "rooms.ndjson", folder / "small.ndjson"
    with archive.open("wb") as file:
        for room in rooms:
            write_ndjson(room, file)
    write_ndjson(generate_room(SHAPES["direct_chat"], 200, seed=99), small)
    keys = {name: key for room in rooms for name, key in room.keys.items()}
    events = sum(map(len, rooms))
    rows: list[Row] = []
    stages: list[tuple[str, float]] = []

    def stage(name: str) -> None:
        stages.append((name, time.perf_counter()))

    with session(master, {"spark.driver.memory": "1500m", "spark.ui.showConsoleProgress": "false"}) as spark:
        import_archive(spark, [str(small)], dsn, server_name=SERVER)
        with _measured(bench) as (cost, spark_seconds):
            summary = import_archive(spark, [str(archive)], dsn, server_name=SERVER, verify_keys=keys, stage=stage)
            stages.append(("end", time.perf_counter()))
        if summary.rejects or summary.lines != events:
            raise SystemExit(f"the import went wrong: {summary}")
        rows.append(_row(f"{master} import", events, cost, spark_seconds[0]))
        rows += [
            {"what": f"{master}   {name}", "seconds": round(end - begin, 2), "events_per_second": round(events / (end - begin))}
            for (name, begin), (_, end) in pairwise(stages)
        ]
        with _measured(bench) as (cost, spark_seconds):
            export_parquet(spark, dsn, str(folder / master), verify=False)
        rows.append(_row(f"{master} export", events, cost, spark_seconds[0]))
        with _measured(bench) as (cost, spark_seconds):
            findings = verify(spark, dsn).count()
        rows.append(_row(f"{master} verify", events, cost, spark_seconds[0]) | {"findings": findings})
    return rows


@contextmanager
def _measured(bench: Bench) -> Iterator[tuple[Spent, list[float]]]:
    """As `spent`, with the processor time of the JVM and its workers, and of the backends that have ended by then."""
    before, ended, seconds = _used(), _ended(bench), [0.0]
    with spent(bench.server) as cost:
        yield cost, seconds
    seconds[0] = _used() - before
    cost.backends += _ended(bench) - ended


def _ended(bench: Bench) -> float:
    times = psutil.Process(bench.server.pid).cpu_times()
    return float(times.children_user + times.children_system)


def _used() -> float:
    found = 0.0
    for process in psutil.Process().children(recursive=True):
        if process.name() != "postgres":
            times = process.cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found


def _row(what: str, events: int, cost: Spent, spark_seconds: float) -> Row:
    together = cost.python + cost.backends + cost.background + spark_seconds
    return {
        "what": what,
        "events": events,
        "seconds": round(cost.clock, 2),
        "events_per_second": round(events / cost.clock),
        "python_us": round(cost.python / events * 1e6, 1),
        "spark_us": round(spark_seconds / events * 1e6, 1),
        "postgres_us": round((cost.backends + cost.background) / events * 1e6, 1),
        "cpu_us_per_event": round(together / events * 1e6, 1),
    }
