"""`import_archive`: archives into a store, on Spark.

    lines ── examine (each by itself) ──> examined, on disk ──> order of each room, by its slim graph ──> load, rooms side by side

1. Lines are read, parsed, hashed, and checked for signatures in executors; what is wrong with one goes to the dead letters.
2. A room's lines get an order in which each comes after what it needs, from their ids alone.
3. Each loading task is a writer of the store, the same as the live path's, and takes whole rooms: the large ones are dealt out by size, the
   others by hash. Rows are sorted by Spark, on disk where need be, so no worker holds a room.

So an import stores what appending the lines one by one in that order would store. It writes beside others, and is run again after an
interruption: what is stored answers "duplicate". A room's events become visible as they are appended, as those of any append.
"""

import heapq
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Final, LiteralString

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from signedjson.types import VerifyKey

from storage.database.arrow import arrow_snapshot
from storage.pipeline.archives import broken_frame, found, lines_frame, literal, parquet_frame
from storage.pipeline.examining import EXAMINED, Examiner, created, key_texts
from storage.pipeline.loading import LOADED, Target, load_batches
from storage.pipeline.ordering import Slim, order
from storage.pipeline.rows import spark_ddl

SQL_KNOWN_ROOMS: Final[LiteralString] = """
SELECT room_id, room_version
FROM rooms
"""

REJECTED: Final = ("bad_file", "bad_line", "invalid", "missing_parents")
SORT: Final = ("path_index", "place", "source", "line")
RANKED: Final = pa.schema([("room_id", pa.string()), ("source", pa.string()), ("line", pa.int64()), ("rank", pa.int64())])
LARGE_SHARE: Final = 8
"""A room is dealt out by its size if it has more than one part in so many of what a writer has to load."""

Stage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """What became of the lines. ``outcomes``: those of api.md, "Writing", and ``bad_line``, ``bad_file``."""

    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def lines(self) -> int:
        """How many lines and rows there were."""
        return sum(self.outcomes.values()) - self.outcomes["bad_file"]

    @property
    def rejects(self) -> int:
        """How many were not stored."""
        return sum(self.outcomes[name] for name in REJECTED)


def import_archive(
    spark: SparkSession,
    paths: Sequence[str],
    dsn: str,
    *,
    server_name: str | None = None,
    rejects: str | None = None,
    room_version: str | None = None,
    verify_keys: Mapping[tuple[str, str], VerifyKey] | None = None,
    writers: int | None = None,
    instance_name: str = "spark",
    work: str | None = None,
    stage: Stage = lambda _: None,
) -> ImportSummary:
    """Store the events of NDJSON and Parquet files (also those of `export_parquet`); what is not stored goes to ``rejects``, as Parquet.

    ``writers`` tasks load at once (default: as many as Spark runs), each with two connections at most. ``work`` is a folder that all
    executors reach (default: a temporary one, for local masters); what is in it is overwritten. ``verify_keys``: signatures are checked.
    ``stage`` is told what begins. `InputError`, `DatabaseError`; Spark's own errors where an executor fails for good.
    """
    sources = found(paths)
    with _folder(work) as folder:
        stage("examining")
        examiner = Examiner(_known(dsn), room_version, key_texts(verify_keys or {}))
        frames = [one for one in (lines_frame(spark, sources.lines), parquet_frame(spark, sources.parquet)) if one is not None]
        if frames:
            lines = reduce(DataFrame.unionByName, frames)
            _examine(lines, examiner, folder + "/examined")
        if sources.broken:
            broken_frame(spark, sources.broken).write.mode("append" if frames else "overwrite").parquet(folder + "/examined")
        stage("ordering")
        examined = spark.read.schema(spark_ddl(EXAMINED)).parquet(literal(folder) + "/examined")
        ranked = _ranked(examined.where("outcome IS NULL"))
        ranked.write.mode("overwrite").parquet(folder + "/ranked")
        stage("loading")
        tasks = writers or spark.sparkContext.defaultParallelism
        target = Target(dsn, server_name, instance_name)
        loaded = _sorted(spark, examined.where("outcome IS NULL"), folder + "/ranked", tasks)
        loaded.mapInArrow(_loading(target), spark_ddl(LOADED)).write.mode("overwrite").parquet(folder + "/loaded")
        return _told(spark, folder, rejects)


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


# --------------------------------------------------------------------------------------------------------------- examine


def _examine(lines: DataFrame, examiner: Examiner, path: str) -> None:
    """Rooms that nobody names the version of are looked for in the create events first."""
    versions = dict(examiner.versions)
    if examiner.room_version is None:
        for row in lines.mapInArrow(_created, "room_id string, room_version string").collect():
            versions.setdefault(row["room_id"], row["room_version"])
    ready = Examiner(versions, examiner.room_version, examiner.keys)

    def examine(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(ready.batch, batches)

    lines.mapInArrow(examine, spark_ddl(EXAMINED)).write.mode("overwrite").parquet(path)


def _created(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rooms = created(batch)
        yield pa.RecordBatch.from_arrays(
            [pa.array(list(rooms), pa.string()), pa.array(list(rooms.values()), pa.string())], ["room_id", "room_version"]
        )


# ----------------------------------------------------------------------------------------------------------------- order


def _ranked(examined: DataFrame) -> DataFrame:
    """The places of the lines of rooms that cannot be stored as they stand."""
    slim = examined.select("room_id", *SORT, "event_id", "origin", "needs")
    return slim.repartition("room_id").sortWithinPartitions("room_id", *SORT).mapInArrow(_rank_all, spark_ddl(RANKED))


def _rank_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rooms one after the other; only one is held."""
    room: str | None = None
    lines: list[Slim] = []
    places: list[tuple[str, int]] = []
    for batch in batches:
        for row in batch.to_pylist():
            if row["room_id"] != room:
                yield from _rank(room, lines, places)
                room, lines, places = row["room_id"], [], []
            lines.append(Slim(row["event_id"], row["origin"] == "outlier", row["needs"]))
            places.append((row["source"], row["line"]))
    yield from _rank(room, lines, places)


def _rank(room: str | None, lines: Sequence[Slim], places: Sequence[tuple[str, int]]) -> Iterator[pa.RecordBatch]:
    ordered = order(lines)
    if ordered is not None:
        rows = [{"room_id": room, "source": places[at][0], "line": places[at][1], "rank": rank} for rank, at in enumerate(ordered)]
        yield pa.RecordBatch.from_pylist(rows, schema=RANKED)


# ------------------------------------------------------------------------------------------------------------------ load


def _sorted(spark: SparkSession, examined: DataFrame, ranked: str, tasks: int) -> DataFrame:
    """What each task loads: whole rooms, each in its order."""
    ranks = spark.read.schema(spark_ddl(RANKED)).parquet(literal(ranked))
    whole = examined.join(ranks, ["room_id", "source", "line"], "left")
    order_by: list[Column | str | int] = ["room_id", f.coalesce("rank", f.lit(0)), *SORT]
    return whole.repartitionById(tasks, _task(examined, tasks)).sortWithinPartitions(*order_by)


def _task(examined: DataFrame, tasks: int) -> Column:
    """The number of the task that loads a row's room."""
    sizes = examined.groupBy("room_id").count()
    total = examined.count()
    large = sizes.where(f.col("count") > total / tasks / LARGE_SHARE).collect()
    dealt = deal({row["room_id"]: row["count"] for row in large}, tasks, total)
    by_hash = f.pmod(f.xxhash64("room_id"), f.lit(tasks)).cast("int")
    if not dealt:
        return by_hash
    known = f.create_map(*(f.lit(one) for pair in dealt.items() for one in pair))
    return f.coalesce(f.element_at(known, f.col("room_id")), by_hash)


def deal(large: Mapping[str, int], tasks: int, total: int) -> dict[str, int]:
    """Large rooms, the largest first, each to the task that has least to do; what is left of the total lies evenly on all."""
    rest = (total - sum(large.values())) / tasks
    loads = [(rest, task) for task in range(tasks)]
    heapq.heapify(loads)
    dealt: dict[str, int] = {}
    for room, size in sorted(large.items(), key=lambda item: (-item[1], item[0])):
        load, task = heapq.heappop(loads)
        dealt[room] = task
        heapq.heappush(loads, (load + size, task))
    return dealt


def _loading(target: Target) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        return load_batches(target, 0 if context is None else context.partitionId(), batches)

    return load


# ------------------------------------------------------------------------------------------------------------------ tell


def _told(spark: SparkSession, folder: str, rejects: str | None) -> ImportSummary:
    """Count; and write the dead letters."""
    examined = spark.read.schema(spark_ddl(EXAMINED)).parquet(literal(folder) + "/examined").where("outcome IS NOT NULL")
    columns = ["source", "line", "outcome", "event_id", "reason", "missing", "pdu"]
    early = examined.withColumn("missing", f.array().cast("array<string>")).select(*columns)
    loaded = spark.read.schema(spark_ddl(LOADED)).parquet(literal(folder) + "/loaded")
    outcomes = Counter[str]()
    for frame, count in ((early, f.count("*")), (loaded, f.sum("count"))):
        outcomes.update({row["outcome"]: row["n"] for row in frame.groupBy("outcome").agg(count.alias("n")).collect()})
    if rejects is not None:
        late = loaded.where(f.col("outcome").isin(*REJECTED)).select(*columns)
        early.unionByName(late).write.mode("overwrite").parquet(rejects)
    return ImportSummary(outcomes)
