"""Distribute work to tasks, only with calls that Spark Connect has, too.

Work travels as rows, one partition for each task. A closure would be sent to every task as a whole,
and Spark Connect has no broadcasts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import orjson
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, is_remote
from pyspark.sql import functions as f

PROBED: Final = 1 << 16
"""Rows of the frame that Spark splits by its own measure; more than any cluster has cores."""

WORK: Final = pa.schema([("task", pa.int32()), ("work", pa.binary())])

Batches = Iterator[pa.RecordBatch]
MapBatches = Callable[[Batches], Batches]


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks Spark runs at once, as far as it knows its executors now.

    Spark Connect does not say it: a small job shows into how many partitions Spark splits a frame.
    """
    if not is_remote():
        return int(spark.sparkContext.defaultParallelism)  # without a job, which takes 0.1 s
    return spark.range(PROBED).select(f.spark_partition_id()).distinct().count()


def dealt_work(spark: SparkSession, tasks: Sequence[Sequence[Any]]) -> DataFrame:
    """Return a frame with a partition for each task; `taken_work` reads its items there.

    An item is anything that JSON can express, or a named tuple of such; it comes back as a list.
    """
    rows = [
        (task, orjson.dumps(one, default=list)) for task, items in enumerate(tasks) for one in items
    ]
    columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(WORK)]
    frame = spark.createDataFrame(pa.Table.from_arrays(columns, schema=WORK))
    return frame.repartitionById(max(len(tasks), 1), "task")


def taken_work(batches: Batches) -> Iterator[Any]:
    """Yield the items of a task, in order."""
    for batch in batches:
        yield from map(orjson.loads, batch.column("work").to_pylist())
