"""The memory of Spark for one room of a million events: import, export, rebuild with a writer.

The import checks hashes. The room is written to a file first. `STORAGE_BENCH_GIANT` sets the number
of events. Memory is sampled every half second: the maximum of the JVM and of each worker, and the
maximum of all together.
"""

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

import psutil

import storage
from benchmarks.harness import Bench, show
from storage.pipeline import export_parquet, import_archive
from storage.pipeline.session import session
from storage.rebuild import Rebuilder
from storage.testing import SHAPES, GeneratedEvent, stream_room, write_ndjson

SERVER: Final = "s1.test"
HEAP: Final = "1500m"
PAUSE_SECONDS: Final = 0.5
LATER: Final = 5_000
"""Events that are not imported, but appended while the room is rebuilt."""

Row = dict[str, Any]


class ProcessMemory(threading.Thread):
    """Samples the memory of the child processes.

    ``most``: megabytes of the largest of each name; ``together``: of all but Postgres.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most: dict[str, float] = {}
        self.together = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        """Sample until `end`."""
        while not self._ended.wait(PAUSE_SECONDS):
            held = list(_held())
            self.together = max(self.together, sum(size for _, size in held))
            for name, size in held:
                self.most[name] = max(self.most.get(name, 0.0), size)

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self.join()


def _held() -> Iterator[tuple[str, float]]:
    for process in psutil.Process().children(recursive=True):
        try:
            name, size = process.name(), process.memory_info().rss / 1e6
        except psutil.Error:
            continue  # the process has ended
        if name != "postgres":
            yield name, size


@contextmanager
def watched() -> Iterator[ProcessMemory]:
    """Sample while the block runs."""
    memory = ProcessMemory()
    memory.start()
    try:
        yield memory
    finally:
        memory.end()


async def run(bench: Bench) -> None:
    """Write the file, import it, export, rebuild."""
    count = int(os.environ.get("STORAGE_BENCH_GIANT", bench.size(1_000_000, 5_000)))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="room-storage-giant-") as folder:
        room = stream_room(SHAPES["small_chat"], count + LATER, seed=1, sign=False)
        archive = Path(folder) / "room.ndjson"
        events = iter(room)
        with _measured(rows, "written", count):
            await asyncio.to_thread(write_ndjson, islice(events, count), archive)
        async with bench.database() as dsn:
            await asyncio.to_thread(_on_spark, rows, Path(folder), archive, dsn, count)
            rows.append(await _rebuilt(dsn, room.room_id, events))
    bench.results["rows"] = rows
    bench.write()
    columns = [
        "what",
        "events",
        "seconds",
        "events_per_second",
        "jvm_mb",
        "worker_mb",
        "together_mb",
        "held_ms",
        "longest_append_ms",
    ]
    show("giant", columns, [[row.get(column, "") for column in columns] for row in rows])


def _on_spark(rows: list[Row], folder: Path, archive: Path, dsn: str, count: int) -> None:
    stages: list[tuple[str, float]] = []
    with session(
        "local[2]", {"spark.driver.memory": HEAP, "spark.ui.showConsoleProgress": "false"}
    ) as spark:
        with _measured(rows, "import", count):
            summary = import_archive(
                spark,
                [str(archive)],
                dsn,
                server_name=SERVER,
                stage=lambda name: stages.append((name, time.perf_counter())),
            )
            stages.append(("end", time.perf_counter()))
        if summary.rejects or summary.lines != count:
            raise SystemExit(f"the import went wrong: {summary}")
        for (name, begin), (_, end) in pairwise(stages):
            rows.append(
                {
                    "what": f"  {name}",
                    "seconds": round(end - begin, 1),
                    "events_per_second": round(count / (end - begin)),
                }
            )
        with _measured(rows, "export, read back", count):
            export_parquet(spark, dsn, str(folder / "export"))


@contextmanager
def _measured(rows: list[Row], what: str, events: int) -> Iterator[None]:
    begun = time.perf_counter()
    with watched() as memory:
        yield
    seconds = time.perf_counter() - begun
    row: Row = {
        "what": what,
        "events": events,
        "seconds": round(seconds, 1),
        "events_per_second": round(events / seconds),
    }
    row |= {"jvm_mb": round(memory.most.get("java", 0)), "together_mb": round(memory.together)}
    row["worker_mb"] = round(
        max((size for name, size in memory.most.items() if name.startswith("python")), default=0)
    )
    rows.append(row)


async def _rebuilt(dsn: str, room_id: str, later: Iterator[GeneratedEvent]) -> Row:
    """Rebuild while events are appended to the room, twice a second."""
    waited: list[float] = []
    async with (
        storage.open(dsn, server_name=SERVER) as store,
        Rebuilder.opened(dsn, SERVER) as rebuilder,
    ):
        begun = time.perf_counter()
        rebuilding = asyncio.create_task(rebuilder.rebuild(room_id))
        while not rebuilding.done():
            started = time.perf_counter()
            event = next(later, None)
            if event is not None:
                await store.append([event.pdu])
                waited.append((time.perf_counter() - started) * 1000)
            await asyncio.wait({rebuilding}, timeout=PAUSE_SECONDS)
        done = rebuilding.result()
    seconds = time.perf_counter() - begun
    return {
        "what": "rebuild, nothing wrong",
        "events": done.planned,
        "seconds": round(seconds, 1),
        "events_per_second": round(done.planned / seconds),
        "held_ms": round(done.held_ms),
        "changed": done.events,
        "worker_mb": round(psutil.Process().memory_info().rss / 1e6),
        "longest_append_ms": round(max(waited)),
    }
