"""`import_archive`: import archives into a store, on Spark.

  lines ── examine (each by itself) ──> bytes: staged in the database, by COPY
                  └──> bundles of slim events, in files ── by room ──> plan, write whole rooms

1. Executors read, parse and hash the lines, and check signatures. A bad line goes to the dead
   letters. The bytes leave Spark at this point (`storage.pipeline.imports.stage`). The rest is the
   data that planning needs, some 300 bytes a message (`storage.pipeline.imports.slim_event`). It
   waits in files of the folder ``work`` (`storage.pipeline.imports.bundle_files`). Only its
   location passes through Spark.
2. Each loading task takes whole rooms; large ones are distributed by size, the others by hash. A
   room that the store does not have is planned in memory, by the live path's planner, in the order
   of `line_order`. It is written in one transaction, and its events take their bytes from the
   staged rows. No worker has the bytes of a whole room in memory, or the rows of a large one.

So an import stores the same as appending the lines one by one. It runs while others write, and can
be run again after an interruption: a room is stored whole or not at all, and stored events are
duplicates. Each database allows one import at a time.
"""

import heapq
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Final, LiteralString

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from signedjson.types import VerifyKey

from storage.database.arrow_results import arrow_snapshot
from storage.persist.receive import note_created
from storage.pipeline.failures import executor_errors
from storage.pipeline.imports.append_events import PART, StoreTarget, TaskAttempt, spare_collector
from storage.pipeline.imports.archive_files import (
    ArchiveFiles,
    bounded,
    found,
    literal,
    numbered,
    together,
)
from storage.pipeline.imports.bundle_files import cleared
from storage.pipeline.imports.lines import FileRange, placed
from storage.pipeline.imports.load_rooms import LOADED, load_rooms
from storage.pipeline.imports.stage import staging
from storage.pipeline.imports.validate import (
    EXAMINED,
    LineValidator,
    TaskValidation,
    key_texts,
    looked_over,
)
from storage.pipeline.source.rows import spark_ddl
from storage.pipeline.synapse.source import LACKING_MAX, Synapse

SQL_KNOWN_ROOMS: Final[LiteralString] = """
SELECT room_id, room_version
FROM rooms
"""

REJECTED: Final = ("bad_file", "bad_line", "invalid", "missing_parents")
BUNDLES: Final = (
    "room_id",
    "room_version",
    "path_index",
    "first",
    "last",
    "events",
    "file",
    "start",
    "length",
)
SORT: Final = ("room_id", "path_index", "first")
LARGE_SHARE: Final = 8
"""A room is distributed by size if it exceeds this fraction of a writer's load (one in so many)."""

LARGE_MAX: Final = 1_000
LOOKED_OVER_MAX: Final = 1_000
"""Ranges per task; small files are ranges, too."""

Stage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """The numbers of lines by outcome.

    ``outcomes``: those of `Store.append`, and ``bad_line``, ``bad_file``. ``lacking``: positions of
    a Synapse's events with missing dependencies; more than `LACKING_MAX` if there are more.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    lacking: tuple[int, ...] = ()

    @property
    def lines(self) -> int:
        """Return how many lines and rows there were."""
        return sum(self.outcomes.values()) - self.outcomes["bad_file"]

    @property
    def rejects(self) -> int:
        """Return how many were not stored."""
        return sum(self.outcomes[name] for name in REJECTED)


@executor_errors()
def import_archive(
    spark: SparkSession,
    paths: Sequence[str] | Synapse,
    dsn: str,
    *,
    server_name: str | None = None,
    rejects: str | None = None,
    room_version: str | None = None,
    verify_keys: Mapping[tuple[str, str], VerifyKey] | None = None,
    writers: int | None = None,
    instance_name: str = "spark",
    work: str | None = None,
    part: int = PART,
    stage: Stage = lambda _: None,
) -> ImportSummary:
    """Store the events of NDJSON and Parquet files, of /backfill responses, or of a `Synapse`.

    Parquet may come from `export_parquet`. Events that are not stored go to ``rejects``, as
    Parquet.

    ``writers``: tasks that run at once in each stage (default: as many as Spark runs), with at most
    two connections each; the driver has one. ``work``: a folder that all executors reach, or a URI
    that both Hadoop and Arrow know (default: a temporary folder, for local masters). Its content is
    overwritten. ``verify_keys``: check signatures with these keys. ``part``: events planned before
    they are written; a larger room is written in parts, in one transaction. ``stage`` is called
    with the name of each stage.

    Raise `InputError`, `DatabaseError`, or `DatabaseConflict` while another import runs. If an
    executor fails for good, raise its error, or a `StorageError` that says what Spark lacks.
    """
    sources = paths if isinstance(paths, Synapse) else found(paths)
    tasks = writers or spark.sparkContext.defaultParallelism
    with _folder(work) as folder, staging(dsn) as number:
        stage("examining")
        cleared(folder)
        ranges, versions = _looked_over(
            spark, sources.ranges(spark.sparkContext.defaultParallelism)
        )
        known = _known(dsn)
        examiner = LineValidator(
            versions | known, room_version, key_texts(verify_keys or {}), frozenset(known)
        )
        _examine(
            spark,
            bounded(together(ranges), writers),
            TaskValidation(examiner, dsn, number, folder),
            folder + "/examined",
        )
        examined = spark.read.schema(spark_ddl(EXAMINED)).parquet(literal(folder) + "/examined")
        stage("loading")
        bundles = examined.where("outcome IS NULL").select(*BUNDLES)
        dealt = bundles.repartitionById(tasks, _task(bundles, tasks)).sortWithinPartitions(*SORT)
        loading = _loading(StoreTarget(dsn, server_name, instance_name, part), number, folder)
        dealt.mapInArrow(loading, spark_ddl(LOADED)).write.mode("overwrite").parquet(
            folder + "/loaded"
        )
        return _summary(spark, folder, sources, rejects)


@contextmanager
def _folder(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given.rstrip("/")
        return
    made = tempfile.mkdtemp(prefix="room-storage-spark-")
    try:
        yield made
    finally:
        shutil.rmtree(Path(made))


def _known(dsn: str) -> dict[str, str]:
    with arrow_snapshot(dsn) as conn:
        return {row["room_id"]: row["room_version"] for row in conn.rows(SQL_KNOWN_ROOMS)}


# ------------------------------------------------------------------------------------------------
# examine


def _each(spark: SparkSession, tasks: Sequence[Sequence[FileRange]]) -> tuple[DataFrame, Any]:
    """Return a frame with a partition for each task, and the broadcast with its ranges."""
    return spark.range(0, len(tasks), 1, max(len(tasks), 1)), spark.sparkContext.broadcast(tasks)


def _looked_over(
    spark: SparkSession, ranges: Sequence[FileRange]
) -> tuple[list[FileRange], dict[str, str]]:
    """Return the ranges with line numbers, and the versions of rooms by their create events.

    Only the JSON of create events is parsed.
    """
    lines = [one for one in ranges if one.kind in {"lines", "answer"}]
    if not lines:
        return list(ranges), {}
    frame, sent = _each(spark, _shared(lines, spark.sparkContext.defaultParallelism))

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        spare_collector()
        for batch in batches:
            for span in (one for index in batch.column(0).to_pylist() for one in sent.value[index]):
                count, created = looked_over(span)
                rows = [
                    {
                        "file": span.file,
                        "begin": span.begin,
                        "lines": count,
                        "rooms": list(created.items()),
                    }
                ]
                yield pa.RecordBatch.from_pylist(rows, schema=LOOKED_OVER)

    counts: dict[tuple[int, int], int] = {}
    versions: dict[str, str] = {}
    for row in frame.mapInArrow(look, LOOKED_OVER_DDL).collect():
        counts[row["file"], row["begin"]] = row["lines"]
        for room_id, version in row["rooms"].items():
            note_created(versions, room_id, version)
    return list(numbered(ranges, counts)), versions


def _shared(ranges: Sequence[FileRange], tasks: int) -> list[Sequence[FileRange]]:
    """Group ranges per task: a scan takes less time than the start of a Python task (70 ms)."""
    each = min(ceil(len(ranges) / tasks), LOOKED_OVER_MAX)
    return [ranges[first : first + each] for first in range(0, len(ranges), each)]


LOOKED_OVER: Final = pa.schema(
    [
        ("file", pa.int64()),
        ("begin", pa.int64()),
        ("lines", pa.int64()),
        ("rooms", pa.map_(pa.string(), pa.string())),
    ]
)
LOOKED_OVER_DDL: Final = "file bigint, begin bigint, lines bigint, rooms map<string, string>"


def _examine(
    spark: SparkSession,
    tasks: Sequence[Sequence[FileRange]],
    examination: TaskValidation,
    path: str,
) -> None:
    frame, sent = _each(spark, tasks)

    def examine(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return examination.run(
            one
            for batch in batches
            for index in batch.column(0).to_pylist()
            for one in sent.value[index]
        )

    frame.mapInArrow(examine, spark_ddl(EXAMINED)).write.mode("overwrite").parquet(path)


# ------------------------------------------------------------------------------------------------
# load


def _task(bundles: DataFrame, tasks: int) -> Column:
    """Return the number of the task that loads a bundle's room."""
    by_hash = f.pmod(f.xxhash64("room_id"), f.lit(tasks)).cast("int")
    if tasks == 1:
        return f.lit(0)
    sizes = bundles.groupBy("room_id").agg(f.sum("events").alias("size"))
    total = f.sum("size").over(Window.partitionBy(f.lit(1)))
    rows = sizes.withColumn("total", total).orderBy(f.desc("size")).limit(LARGE_MAX).collect()
    large = {
        row["room_id"]: row["size"]
        for row in rows
        if row["size"] > row["total"] / tasks / LARGE_SHARE
    }
    dealt = deal(large, tasks, rows[0]["total"] if rows else 0)
    if not dealt:
        return by_hash
    known = f.create_map(*(f.lit(one) for pair in dealt.items() for one in pair))
    return f.coalesce(f.element_at(known, f.col("room_id")), by_hash)


def deal(large: Mapping[str, int], tasks: int, total: int) -> dict[str, int]:
    """Assign large rooms, the largest first, each to the task with the least work.

    The rest of the total counts as evenly distributed.
    """
    rest = (total - sum(large.values())) / tasks
    loads = [(rest, task) for task in range(tasks)]
    heapq.heapify(loads)
    dealt: dict[str, int] = {}
    for room, size in sorted(large.items(), key=lambda item: (-item[1], item[0])):
        load, task = heapq.heappop(loads)
        dealt[room] = task
        heapq.heappush(loads, (load + size, task))
    return dealt


def _loading(
    target: StoreTarget, number: int, work: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return load_rooms(target, number, work, TaskAttempt.of(TaskContext.get()), batches)

    return load


# ------------------------------------------------------------------------------------------------
# results


def _summary(
    spark: SparkSession, folder: str, sources: ArchiveFiles | Synapse, rejects: str | None
) -> ImportSummary:
    """Count the results, and write the dead letters."""
    columns = ["place", "outcome", "events", "event_id", "reason", "missing", "pdu"]
    examined = (
        spark.read.schema(spark_ddl(EXAMINED))
        .parquet(literal(folder) + "/examined")
        .where("outcome IS NOT NULL")
    )
    early = examined.withColumn("missing", f.array().cast("array<string>")).select(*columns)
    loaded = (
        spark.read.schema(spark_ddl(LOADED)).parquet(literal(folder) + "/loaded").select(*columns)
    )
    both = early.unionByName(loaded)
    outcomes = Counter[str](
        {
            row["outcome"]: row["n"]
            for row in both.groupBy("outcome").agg(f.sum("events").alias("n")).collect()
        }
    )
    outcomes["bad_file"] += len(sources.broken)
    lacking = _lacking(both) if isinstance(sources, Synapse) and outcomes["missing_parents"] else ()
    if rejects is not None:
        _dead_letters(spark, both.where(f.col("outcome").isin(*REJECTED)), sources, rejects)
    return ImportSummary(+outcomes, lacking)


def _lacking(results: DataFrame) -> tuple[int, ...]:
    found = results.where("outcome = 'missing_parents'").select("place").limit(LACKING_MAX + 1)
    return tuple(sorted(row["place"] for row in found.collect()))


DEAD_LETTERS: Final = pa.schema(
    [
        ("source", pa.string()),
        ("line", pa.int64()),
        ("part", pa.int64()),
        ("outcome", pa.string()),
        ("event_id", pa.string()),
        ("reason", pa.string()),
        ("missing", pa.list_(pa.string())),
        ("pdu", pa.binary()),
    ]
)
"""Events that were not stored.

``line``: from 1; for Parquet the number of the row, for a Synapse the stream ordering; null for a
file that cannot be read. ``part``: the index of the PDU in a /backfill response, from 1; null where
the response itself is bad.
"""


def _dead_letters(
    spark: SparkSession, rejected: DataFrame, sources: ArchiveFiles | Synapse, path: str
) -> None:
    names, line_of = sources.names, sources.line_of

    def letters(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = []
            for row in batch.to_pylist():
                file, number = placed(row["place"])
                line, part = line_of(file, number)
                rows.append({**row, "source": names[file], "line": line, "part": part})
            yield pa.RecordBatch.from_pylist(rows, schema=DEAD_LETTERS)

    written = rejected.mapInArrow(letters, spark_ddl(DEAD_LETTERS))
    if sources.broken:
        broken: list[Any] = [
            (source, None, None, "bad_file", None, reason, [], None)
            for source, reason in sources.broken.items()
        ]
        written = written.unionByName(spark.createDataFrame(broken, spark_ddl(DEAD_LETTERS)))
    written.write.mode("overwrite").parquet(path)
