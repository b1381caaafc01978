"""The memory of the driver of each Spark job, for few rooms and for many.

Each room has one create event, so its other costs are as small as they can be. The jobs run on a
cluster of two workers of one core, each job in a process of its own, which is the driver. The
results are the peak of Python's resident memory, that of the JVM's, and the heap in use after a
collection at the end. `STORAGE_BENCH_ROOMS` sets the
numbers of rooms, as ``1000,1000000``; `STORAGE_BENCH_JOBS` the jobs, of those in `JOBS`;
`STORAGE_BENCH_SECONDS` after how many seconds a job other than the import is stopped. A stopped job
has planned its tasks for all rooms, and has run some of them.
"""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import orjson
import psutil
from unpaddedbase64 import encode_base64

from benchmarks.harness import Bench, note, show
from storage.pipeline import export_parquet, import_archive, mirror, rebuild, verify
from storage.pipeline.session import session
from tests.pipeline.cluster import cluster

SERVER: Final = "s1.test"
CONF: Final = {
    "spark.driver.memory": "600m",
    "spark.executor.memory": "450m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
PEAK: Final = "VmHWM:"
"""The line of /proc/PID/status with the peak of the resident memory, in kB. It begins at exec."""

Row = dict[str, Any]


async def run(bench: Bench) -> None:
    """Run the jobs one after another on each number of rooms, each number in a fresh database."""
    given = os.environ.get("STORAGE_BENCH_ROOMS", "100,300" if bench.quick else "1000,1000000")
    wanted = os.environ.get("STORAGE_BENCH_JOBS", ",".join(JOBS)).split(",")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="room-storage-bench-") as folder:
        for count in map(int, given.split(",")):
            where = Path(folder) / str(count)
            where.mkdir()
            await asyncio.to_thread(_write, where / "rooms.ndjson", count)
            async with bench.database() as dsn:
                with cluster(where / "cluster") as (master, _):
                    for job in wanted:
                        row = await asyncio.to_thread(_measured, job, master, dsn, where)
                        rows.append({"job": job, "rooms": count, **row})
                        note(f"{rows[-1]}")
    bench.results["rows"] = rows
    bench.write()
    columns = [
        "job",
        "rooms",
        "done",
        "seconds",
        "python_mb",
        "jvm_mb",
        "jvm_heap_mb",
        "together_mb",
    ]
    show("memory of the driver", columns, [[row[one] for one in columns] for row in rows])


def _write(path: Path, count: int) -> None:
    """Write an archive of so many rooms, each a create event with its hash."""
    with path.open("wb") as file:
        for number in range(count):
            pdu: Row = {
                "auth_events": [],
                "content": {"room_version": "11"},
                "depth": 1,
                "origin_server_ts": 1_700_000_000_000 + number,
                "prev_events": [],
                "room_id": f"!room{number}:{SERVER}",
                "sender": f"@user{number % 1_000}:{SERVER}",
                "state_key": "",
                "type": "m.room.create",
            }
            digest = hashlib.sha256(orjson.dumps(pdu, option=orjson.OPT_SORT_KEYS)).digest()
            pdu |= {"hashes": {"sha256": encode_base64(digest)}, "signatures": {}}
            file.write(orjson.dumps(pdu, option=orjson.OPT_SORT_KEYS) + b"\n")


def _measured(job: str, master: str, dsn: str, where: Path) -> Row:
    command = [sys.executable, "-m", "benchmarks.driver_memory", job, master, dsn, str(where)]
    environ = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    found: Row = json.loads(done.stdout)
    return found


# ------------------------------------------------------------------------------------------------
# a driver


def _import(spark: Any, dsn: str, where: Path) -> None:
    summary = import_archive(
        spark,
        [str(where / "rooms.ndjson")],
        dsn,
        server_name=SERVER,
        work=str(where / "work"),
    )
    if summary.rejects:
        raise SystemExit(f"the import went wrong: {summary}")


def _verify(spark: Any, dsn: str, _: Path) -> None:
    if found := verify(spark, dsn).count():
        raise SystemExit(f"{found} findings")


def _rebuild(spark: Any, dsn: str, _: Path) -> None:
    if failed := rebuild(spark, dsn):
        raise SystemExit(f"{len(failed)} rooms were not rebuilt")


def _export(spark: Any, dsn: str, where: Path) -> None:
    export_parquet(spark, dsn, str(where / "export"))


def _mirror(spark: Any, dsn: str, where: Path) -> None:
    mirror(spark, dsn, str(where / "mirror"), once=True)


def _compare(spark: Any, dsn: str, where: Path) -> None:
    mirror(spark, dsn, str(where / "mirror"), once=True, compare=True)


JOBS: Final[Mapping[str, Callable[[Any, str, Path], None]]] = {
    "import": _import,
    "verify": _verify,
    "export": _export,
    "mirror": _mirror,
    "mirror --compare": _compare,
    "rebuild": _rebuild,
}


def main() -> None:
    """Run one job as its driver; print what it took as JSON."""
    job, master, dsn, where = sys.argv[1:]
    given = os.environ.get("STORAGE_BENCH_SECONDS")
    limit = None if given is None else float(given)
    with session(master, CONF) as spark:
        begun = time.perf_counter()
        running = ThreadPoolExecutor(1).submit(JOBS[job], spark, dsn, Path(where))
        is_done = bool(wait([running], None if job == "import" else limit).done)
        seconds = time.perf_counter() - begun
        if is_done:
            running.result()
        runtime = spark._jvm.java.lang.Runtime.getRuntime()  # type: ignore[union-attr]  # noqa: SLF001
        spark._jvm.java.lang.System.gc()  # type: ignore[union-attr]  # noqa: SLF001
        heap = (runtime.totalMemory() - runtime.freeMemory()) / 1e6
        [java] = [one for one in psutil.Process().children() if one.name() == "java"]
        python, jvm = _peak_mb(os.getpid()), _peak_mb(java.pid)
        row = {
            "done": is_done,
            "seconds": round(seconds, 1),
            "python_mb": round(python, 1),
            "jvm_mb": round(jvm, 1),
            "jvm_heap_mb": round(heap, 1),
            "together_mb": round(python + jvm, 1),
        }
        print(json.dumps(row), flush=True)
        if not is_done:
            java.terminate()
            os._exit(0)  # the thread of the job would wait for its end


def _peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    [line] = [one for one in lines if one.startswith(PEAK)]
    return int(line.split()[1]) / 1e3


if __name__ == "__main__":
    main()
