"""Spark against one process: the same lines into the same tables, then export and verification.

Both check hashes and signatures. Clock and CPU time are measured, the latter of Python, JVM and
Postgres together. A session is started and warmed up by a small import first, because the start of
a JVM does not depend on the size. Two sizes are imported: their difference is the cost of events
without the job. Rooms have several sizes, the largest with a third of the events.
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
from benchmarks.harness import Bench, Spent, spent
from storage.pipeline import export_parquet, import_archive, verify
from storage.pipeline.session import session
from storage.testing import SHAPES, GeneratedRoom, generate_room, write_ndjson

SERVER: Final = "s1.test"
SHARES: Final = (0.34, 0.2, 0.16, 0.1, 0.1, 0.05, 0.05)
BATCH: Final = 1_000

Row = dict[str, Any]


async def run(bench: Bench) -> None:
    """Generate, append in one process, import on Spark with one and two threads, export, verify."""
    count = bench.size(120_000, 7_000)
    small, large = (_rooms(number, first) for number, first in ((count // 4, 0), (count, 100)))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="room-storage-bench-") as folder:
        for master in ("local[1]", "local[2]"):
            # before and after, because the machine may be shared
            rows.append(await _single(bench, small))
            async with bench.database() as dsn:
                rows += await asyncio.to_thread(
                    _on_spark, bench, Path(folder), (small, large), dsn, master
                )
            rows.append(await _single(bench, small))
    bench.results["rows"] = rows


def _rooms(count: int, first: int) -> list[GeneratedRoom]:
    return [
        generate_room(SHAPES["small_chat"], round(count * share), seed=first + seed)
        for seed, share in enumerate(SHARES)
    ]


async def _single(bench: Bench, rooms: Sequence[GeneratedRoom]) -> Row:
    """Append rooms concurrently through one store, as `room-storage import` does."""
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:

        async def append(room: GeneratedRoom) -> None:
            for at in range(0, len(room), BATCH):
                await store.append(room.pdus[at : at + BATCH], verify_keys=room.keys)

        with spent(bench.server) as cost:
            await asyncio.gather(*map(append, rooms))
    return row_of("one process", sum(map(len, rooms)), cost, 0.0)


def _on_spark(
    bench: Bench, folder: Path, inputs: Sequence[Sequence[GeneratedRoom]], dsn: str, master: str
) -> list[Row]:
    """Import two sizes, to separate the costs of job and events; then export and verify all."""
    begun = folder / "begun.ndjson"
    write_ndjson(generate_room(SHAPES["direct_chat"], 200, seed=99), begun)
    rows: list[Row] = []
    with session(
        master, {"spark.driver.memory": "1500m", "spark.ui.showConsoleProgress": "false"}
    ) as spark:
        import_archive(spark, [str(begun)], dsn, server_name=SERVER)
        for number, rooms in enumerate(inputs):
            archive = folder / f"rooms{number}.ndjson"
            with archive.open("wb") as file:
                for room in rooms:
                    write_ndjson(room, file)
            rows += _imported(bench, spark, archive, rooms, dsn=dsn, master=master)
        totals = [row for row in rows if row["what"].endswith("import")]
        rows.append(_marginal(f"{master} import, of the larger what it has more", *totals))
        events = sum(row["events"] for row in totals) + 200
        with measured(bench) as (cost, spark_seconds):
            export_parquet(spark, dsn, str(folder / master))
        size = sum(file.stat().st_size for file in (folder / master).rglob("*.parquet"))
        rows.append(
            row_of(f"{master} export, read back", events, cost, spark_seconds[0])
            | {"megabytes": round(size / 1e6)}
        )
        with measured(bench) as (cost, spark_seconds):
            findings = verify(spark, dsn).count()
        rows.append(
            row_of(f"{master} verify", events, cost, spark_seconds[0]) | {"findings": findings}
        )
    return rows


def _imported(
    bench: Bench,
    spark: Any,
    archive: Path,
    rooms: Sequence[GeneratedRoom],
    *,
    dsn: str,
    master: str,
) -> list[Row]:
    keys = {name: key for room in rooms for name, key in room.keys.items()}
    events = sum(map(len, rooms))
    stages: list[tuple[str, float]] = []

    def stage(name: str) -> None:
        stages.append((name, time.perf_counter()))

    with measured(bench) as (cost, spark_seconds):
        summary = import_archive(
            spark, [str(archive)], dsn, server_name=SERVER, verify_keys=keys, stage=stage
        )
        stages.append(("end", time.perf_counter()))
    if summary.rejects or summary.lines != events:
        raise SystemExit(f"the import went wrong: {summary}")
    whole = row_of(f"{master} import", events, cost, spark_seconds[0]) | {
        "megabytes": round(archive.stat().st_size / 1e6)
    }
    return [
        whole,
        *(
            {
                "what": f"{master}   {name}",
                "seconds": round(end - begin, 2),
                "events_per_second": round(events / (end - begin)),
            }
            for (name, begin), (_, end) in pairwise(stages)
        ),
    ]


def _marginal(what: str, small: Row, large: Row) -> Row:
    """Return the cost of the additional events of the larger import."""
    more, seconds = large["events"] - small["events"], large["seconds"] - small["seconds"]
    each = (
        large["cpu_us_per_event"] * large["events"] - small["cpu_us_per_event"] * small["events"]
    ) / more
    return {
        "what": what,
        "events": more,
        "seconds": round(seconds, 2),
        "events_per_second": round(more / seconds),
        "cpu_us_per_event": round(each, 1),
    }


@contextmanager
def measured(bench: Bench) -> Iterator[tuple[Spent, list[float]]]:
    """Measure as `spent`, with the CPU time of the JVM and its workers, and of ended backends."""
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


def row_of(what: str, events: int, cost: Spent, spark_seconds: float) -> Row:
    """Return a row of the table: rates, and CPU microseconds per event, by process."""
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
