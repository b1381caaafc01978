"""The Spark import on more resources: one thread, two, and a cluster of two one-core workers.

All import the same rooms, one of which has a third of the events. A small import warms up each
session. Executors have the settings of docs/how-to/submit-to-a-cluster.md. The results are the
rate, the CPU time, and the stages with their tasks: median, longest, shuffled and spilled bytes.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, show
from benchmarks.pipeline import SERVER, SHARES, measured, row_of
from benchmarks.stages import log_settings, stages
from storage.pipeline import import_archive
from storage.pipeline.session import session
from storage.testing import SHAPES, GeneratedRoom, generate_room, write_ndjson
from tests.pipeline.cluster import cluster

CLUSTER: Final = "cluster of two workers"
CONF: Final = {
    "spark.driver.memory": "1500m",
    "spark.executor.memory": "480m",
    # as `storage.pipeline.session` sets it for local masters
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

Row = dict[str, Any]


async def run(bench: Bench) -> None:
    """Run an import on each, into a fresh database."""
    count = bench.size(60_000, 4_000)
    rooms = [
        generate_room(SHAPES["small_chat"], round(count * share), seed=200 + seed)
        for seed, share in enumerate(SHARES)
    ]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="room-storage-bench-") as folder:
        _write(Path(folder), rooms)
        for where in ("local[1]", "local[2]", CLUSTER):
            async with bench.database() as dsn:
                rows.append(
                    await asyncio.to_thread(_imported, bench, Path(folder), rooms, dsn, where)
                )
    bench.results["rows"] = rows
    bench.write()
    columns = ["what", "events", "seconds", "events_per_second", "cpu_us_per_event", "times_of_one"]
    for row in rows:
        row["times_of_one"] = round(row["events_per_second"] / rows[0]["events_per_second"], 2)
    show(
        "the import over more executors",
        columns,
        [[row[column] for column in columns] for row in rows],
    )
    for row in rows:
        show(
            f"stages: {row['what']}",
            list(row["stages"][0]),
            [list(stage.values()) for stage in row["stages"]],
        )


def _write(folder: Path, rooms: Sequence[GeneratedRoom]) -> None:
    write_ndjson(generate_room(SHAPES["direct_chat"], 200, seed=99), folder / "begun.ndjson")
    for number, room in enumerate(rooms):
        write_ndjson(room, folder / f"room{number}.ndjson")


def _imported(
    bench: Bench, folder: Path, rooms: Sequence[GeneratedRoom], dsn: str, where: str
) -> Row:
    keys = {name: key for room in rooms for name, key in room.keys.items()}
    paths = [str(folder / f"room{number}.ndjson") for number in range(len(rooms))]
    log = folder / f"log {where}"
    events = sum(map(len, rooms))
    with ExitStack() as stack:
        master = stack.enter_context(cluster(folder / "cluster"))[0] if where == CLUSTER else where
        spark = stack.enter_context(session(master, {**CONF, **log_settings(log)}))
        import_archive(spark, [str(folder / "begun.ndjson")], dsn, server_name=SERVER)
        begun = time.time_ns() // 1_000_000
        with measured(bench) as (cost, spark_seconds):
            summary = import_archive(spark, paths, dsn, server_name=SERVER, verify_keys=keys)
        ended = time.time_ns() // 1_000_000
        if summary.rejects or summary.lines != events:
            raise SystemExit(f"the import went wrong: {summary}")
    return row_of(f"import, {where}", events, cost, spark_seconds[0]) | {
        "stages": stages(log, begun, ended)
    }
