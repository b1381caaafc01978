"""`import_archive`: import archives into a store, on Spark.

  lines ── examine (each by itself) ──> bytes: staged in the database, by COPY
                  └──> bundles of slim events, in files ── by room ──> plan, write whole rooms

1. Executors read, parse and hash the lines, and check signatures. A bad line goes to the dead
   letters. The bytes leave Spark at this point (`storage.pipeline.imports.stage`). The rest is the
   data that planning needs, some 300 bytes a message (`storage.pipeline.imports.validate`). It
   waits in files of the folder ``work`` (`storage.pipeline.imports.intern_names`). Only its
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from signedjson.types import VerifyKey

from storage.config import Config
from storage.database.arrow_results import ArrowConnection, arrow_session
from storage.database.deployment import (
    NEEDS_NAME,
    NO_SERVER,
    SQL_DEPLOYMENT,
    SQL_IS_EMPTY,
    SQL_WHERE,
)
from storage.errors import InputError, WrongServerName
from storage.pipeline.file_systems import below, emptied
from storage.pipeline.imports.append_events import (
    NAMES_MIN,
    PART,
    StoreTarget,
    TaskAttempt,
    spare_collector,
)
from storage.pipeline.imports.dead_letters import REJECTED, refuse_others, write_dead_letters
from storage.pipeline.imports.intern_names import cleared
from storage.pipeline.imports.lines import (
    ArchiveFiles,
    FileRange,
    bounded,
    found,
    numbered,
    together,
)
from storage.pipeline.imports.load_rooms import load_rooms, register_names
from storage.pipeline.imports.stage import staging
from storage.pipeline.imports.task_rows import (
    FOLDER,
    TaskResults,
    frame_of,
    rows_in,
    run_tasks,
)
from storage.pipeline.imports.validate import (
    EXAMINED,
    CreatedRoom,
    LineValidator,
    TaskValidation,
    key_texts,
    scanned_range,
    stage_versions,
)
from storage.pipeline.session import Batches, executor_errors, parallelism, taken_work, task_frame
from storage.pipeline.source.rows import spark_ddl
from storage.pipeline.synapse.source import LACKING_MAX, Synapse

# --------------------------------------------------------------------------------------------------
# Check the server name of an import before anything is read.
#
# The tasks that load the events open stores, which check it as well. That is after all lines were
# read, which takes hours for a large archive.


def check_name(dsn: str, server_name: str | None) -> None:
    """Raise `WrongServerName` for the database of another server.

    Raise `InputError` for a new one without a name.
    """
    with arrow_session(dsn) as conn:
        stored_name = next((row["server_name"] for row in conn.rows(SQL_DEPLOYMENT)), None)
        if stored_name is None and server_name is None:
            raise InputError(NEEDS_NAME)
        if stored_name is None or server_name in {None, NO_SERVER, stored_name}:
            return
        if not conn.rows(SQL_IS_EMPTY)[0]["is_empty"]:
            where = conn.rows(SQL_WHERE)[0]["place"]
            raise WrongServerName(str(server_name), found=stored_name, where=where)


BUNDLES: Final = pa.schema([EXAMINED.field(at) for at in range(EXAMINED.names.index("place"))])
SPREAD: Final = "crc32(room_id)"
"""`spread_number`, in Spark's SQL."""

SORT: Final = (SPREAD, "room_id", "path_index", "first")
EVENTS_EACH: Final = 25_000
"""Events of a loading task: some seconds, as its start takes a tenth of one."""

LARGE_SHARE: Final = 8
"""A room is distributed by size if it exceeds this fraction of a writer's load (one in so many)."""

LARGE_MAX: Final = 1_000
RANGES_PER_TASK_MAX: Final = 1_000
"""Ranges per task; small files are ranges, too."""

Stage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """The numbers of lines by outcome.

    ``outcomes``: those of `Store.append`, and ``bad_line``, ``bad_file``. ``stray_keys`` are lines
    of other outcomes, from which keys of old servers are removed so that the content hash fits.
    ``lacking``: positions of a Synapse's events with missing dependencies; more than `LACKING_MAX`
    if there are more.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    lacking: tuple[int, ...] = ()

    @property
    def lines(self) -> int:
        """Return how many lines and rows there were."""
        others = self.outcomes["bad_file"] + self.outcomes["stray_keys"]
        return sum(self.outcomes.values()) - others

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

    Parquet may come from `export_parquet`. Events that are not stored go to the folder ``rejects``,
    as Parquet. It is emptied, so it must not have other files than those of an earlier import.

    ``writers``: tasks that run at once in each stage (default: as many as Spark runs), with at most
    two connections each; the driver has one. ``work``: a folder or URL that all executors reach
    (default: a temporary folder, for local masters). Its content is overwritten. ``verify_keys``:
    check signatures with these keys. ``part``: events planned before they are written; a larger
    room is written in parts, in one transaction. ``stage`` is called with the name of each stage.

    Raise `InputError`, `DatabaseError`, or `DatabaseConflict` while another import runs. Raise
    `WrongServerName` for the database of another server, before anything is read. If an
    executor fails for good, raise its error, or a `StorageError` that says what Spark lacks.
    """
    if rejects is not None:
        refuse_others(rejects)
    sources = paths if isinstance(paths, Synapse) else found(paths)
    check_name(dsn, server_name)
    cores = parallelism(spark)
    with _folder(work) as folder, staging(dsn) as number:
        stage("examining")
        cleared(folder)
        emptied(below(folder, FOLDER))
        ranges = _scanned(spark, sources.ranges(cores), ScanTask(dsn, number), cores)
        examination = TaskValidation(
            LineValidator({}, room_version, key_texts(verify_keys or {})), dsn, number, folder
        )
        examined = _examine(spark, bounded(together(ranges), writers), examination)
        stage("loading")
        loaded = _load(
            spark,
            examined,
            Loading(StoreTarget(dsn, server_name, instance_name, part), number, folder),
            loading_tasks(writers, cores, examined.events),
            cores,
        )
        return _summary(spark, folder, sources, rejects, (examined, loaded))


@contextmanager
def _folder(work: str | None) -> Iterator[str]:
    if work is not None:
        yield work.rstrip("/")
        return
    made = tempfile.mkdtemp(prefix="room-storage-spark-")
    try:
        yield made
    finally:
        shutil.rmtree(Path(made))


def loading_tasks(writers: int | None, cores: int, events: int) -> int:
    """Return how many tasks load: a core takes several, so that a retry repeats little.

    Each core takes equally many, so that all end at about the same time. Only their number bounds
    how many run at once, so ``writers`` counts where it is given.
    """
    return writers or cores * max(ceil(events / EVENTS_EACH / cores), 1)


# ------------------------------------------------------------------------------------------------
# examine


@dataclass(frozen=True, slots=True)
class ScanTask:
    """Counts lines, and stages the versions that create events say.

    ``number``: of the import in the database of ``dsn``.
    """

    dsn: str = field(repr=False)  # it may contain a password
    number: int
    config: Config = field(default_factory=Config.from_env)

    def run(self, batches: Batches) -> Batches:
        """Yield `SCANNED`, a row per range."""
        spare_collector()
        with ExitStack() as stack:
            conn: ArrowConnection | None = None
            for item in taken_work(batches):
                span = FileRange(*item)
                count, created = scanned_range(span)
                if created:
                    if conn is None:
                        opening = arrow_session(self.dsn, config=self.config)
                        conn = stack.enter_context(opening)
                    rooms = (CreatedRoom(span.file, span.begin, *pair) for pair in created.items())
                    stage_versions(conn, self.number, rooms)
                row = {"file": span.file, "begin": span.begin, "lines": count}
                yield pa.RecordBatch.from_pylist([row], schema=SCANNED)


def _scanned(
    spark: SparkSession, ranges: Sequence[FileRange], task: ScanTask, cores: int
) -> list[FileRange]:
    """Return the ranges with line numbers. Only the JSON of create events is parsed."""
    lines = [span for span in ranges if span.kind in {"lines", "answer"}]
    if not lines:
        return list(ranges)
    frame = task_frame(spark, _shared(lines, cores))
    scanned = frame.mapInArrow(task.run, spark_ddl(SCANNED)).collect()
    counts = {(row["file"], row["begin"]): row["lines"] for row in scanned}
    return list(numbered(ranges, counts))


def _shared(ranges: Sequence[FileRange], tasks: int) -> list[Sequence[FileRange]]:
    """Group ranges per task: a scan takes less time than the start of a Python task (70 ms)."""
    each = min(ceil(len(ranges) / tasks), RANGES_PER_TASK_MAX)
    return [ranges[first : first + each] for first in range(0, len(ranges), each)]


SCANNED: Final = pa.schema([("file", pa.int64()), ("begin", pa.int64()), ("lines", pa.int64())])


def _examine(
    spark: SparkSession, tasks: Sequence[Sequence[FileRange]], examination: TaskValidation
) -> TaskResults:
    def examine(batches: Batches) -> Batches:
        return examination.run(FileRange(*item) for item in taken_work(batches))

    return run_tasks(task_frame(spark, tasks), examine, examination.work, BUNDLES)


# ------------------------------------------------------------------------------------------------
# load


@dataclass(frozen=True, slots=True)
class Loading:
    """The target of the loading tasks, the number of the import, and its folder."""

    target: StoreTarget
    number: int
    work: str


def _load(
    spark: SparkSession, examined: TaskResults, loading: Loading, tasks: int, cores: int
) -> TaskResults:
    """Load the rooms of all bundles, each room in one task."""
    if not examined.bundles:
        return TaskResults()
    bundles = frame_of(spark, loading.work, examined.bundles, BUNDLES)
    task = _task(bundles, tasks, examined.events)
    placed = bundles.repartitionById(tasks, task).sortWithinPartitions(*map(f.expr, SORT))
    names = max(cores, NAMES_MIN)
    if tasks > 1:
        target = loading.target
        writers = (TaskAttempt(number) for number in range(min(tasks, names)))
        register_names(target.dsn, list(map(target.name, writers)), config=target.config)

    def load(batches: Batches) -> Batches:
        attempt = TaskAttempt.of(TaskContext.get(), names)
        return load_rooms(loading.target, loading.number, loading.work, attempt, batches)

    return run_tasks(placed, load, loading.work, BUNDLES)


def _task(bundles: DataFrame, tasks: int, events: int) -> Column:
    """Return the number of the task that loads a bundle's room."""
    if tasks == 1:
        return f.lit(0)
    # ranges of the order in which bundles are in their files
    by_spread = f.shiftright(f.expr(SPREAD) * f.lit(tasks), 32).cast("int")
    sizes = bundles.groupBy("room_id").agg(f.sum("events").alias("size"))
    rows = (
        sizes.where(f.col("size") > events / tasks / LARGE_SHARE)
        .orderBy(f.desc("size"), "room_id")
        .limit(LARGE_MAX)
        .collect()
    )
    task_of_room = assign_rooms({row["room_id"]: row["size"] for row in rows}, tasks, events)
    if not task_of_room:
        return by_spread
    assigned = f.create_map(*(f.lit(value) for pair in task_of_room.items() for value in pair))
    return f.coalesce(f.element_at(assigned, f.col("room_id")), by_spread)


def assign_rooms(large: Mapping[str, int], tasks: int, total: int) -> dict[str, int]:
    """Assign large rooms, the largest first, each to the task with the least work.

    The rest of the total counts as evenly distributed.
    """
    rest = (total - sum(large.values())) / tasks
    loads = [(rest, task) for task in range(tasks)]
    heapq.heapify(loads)
    task_of_room: dict[str, int] = {}
    for room, size in sorted(large.items(), key=lambda item: (-item[1], item[0])):
        load, task = heapq.heappop(loads)
        task_of_room[room] = task
        heapq.heappush(loads, (load + size, task))
    return task_of_room


# ------------------------------------------------------------------------------------------------
# results


def _summary(
    spark: SparkSession,
    folder: str,
    sources: ArchiveFiles | Synapse,
    rejects: str | None,
    results: Sequence[TaskResults],
) -> ImportSummary:
    """Add up the results, and write the dead letters."""
    outcomes = sum((result.outcomes for result in results), Counter[str]())
    files = [name for result in results for name in result.rejects]
    outcomes["bad_file"] += len(sources.broken)
    lacking = (
        _lacking(folder, files)
        if isinstance(sources, Synapse) and outcomes["missing_parents"]
        else ()
    )
    if rejects is not None:
        write_dead_letters(spark, folder, files, sources, rejects)
    return ImportSummary(+outcomes, lacking)


def _lacking(folder: str, files: Sequence[str]) -> tuple[int, ...]:
    places = (
        place
        for batch in rows_in(folder, files, ["place", "outcome"])
        for place, outcome in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        if outcome == "missing_parents"
    )
    return tuple(sorted(islice(places, LACKING_MAX + 1)))
