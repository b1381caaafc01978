"""The rows that the tasks of an import yield: in files of the folder ``work``, not through Spark.

Each attempt at a task writes files of its own, and returns their names with the sums of its rows.
Spark takes the result of one attempt at each task. So the files of a failed or doubled attempt are
never named, and nothing of it is read or counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from storage.pipeline.file_systems import below, io_errors, opened
from storage.pipeline.session import Batches, MapBatches, parallelism, taken_work, task_frame
from storage.pipeline.source.rows import spark_ddl

FOLDER: Final = "rows"
ROWS_MAX: Final = 2_000
"""Rows read at a time."""

RESULT: Final = pa.schema(
    [
        ("bundles", pa.string()),
        ("rejects", pa.string()),
        ("events", pa.int64()),
        ("outcomes", pa.map_(pa.string(), pa.int64())),
    ]
)
RESULT_DDL: Final = "bundles string, rejects string, events bigint, outcomes map<string, bigint>"
REJECTS: Final = pa.schema(
    [
        ("place", pa.int64()),
        ("outcome", pa.string()),
        ("event_id", pa.string()),
        ("reason", pa.string()),
        ("missing", pa.list_(pa.string())),
        ("pdu", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True)
class TaskResults:
    """The results of all tasks of a stage: names of files, and sums."""

    bundles: tuple[str, ...] = ()
    rejects: tuple[str, ...] = ()
    events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


def run_tasks(frame: DataFrame, work: MapBatches, folder: str, bundles: pa.Schema) -> TaskResults:
    """Run ``work`` on each partition, and write its rows below ``folder``.

    A row without ``outcome`` has the columns ``bundles``. One with a ``place`` is a reject; others
    have the number of ``events`` of an outcome.
    """
    found = frame.mapInArrow(_keeping(work, folder, bundles), RESULT_DDL).collect()
    outcomes = Counter[str]()
    for row in found:
        outcomes.update(dict(row["outcomes"]))
    return TaskResults(
        tuple(row["bundles"] for row in found if row["bundles"]),
        tuple(row["rejects"] for row in found if row["rejects"]),
        sum(row["events"] for row in found),
        outcomes,
    )


def _keeping(work: MapBatches, folder: str, bundles: pa.Schema) -> MapBatches:
    def keep(batches: Batches) -> Batches:
        with RowFile(folder, bundles) as of_bundles, RowFile(folder, REJECTS) as of_rejects:
            events, outcomes = 0, Counter[str]()
            for batch in work(batches):
                for at, outcome in enumerate(batch.column("outcome").to_pylist()):
                    if outcome is not None:
                        outcomes[outcome] += batch.column("events")[at].as_py()
                if "room_id" in batch.schema.names:
                    some = batch.filter(pc.is_null(batch.column("outcome")))
                    events += pc.sum(some.column("events")).as_py() or 0
                    of_bundles.write(some)
                of_rejects.write(batch.filter(pc.is_valid(batch.column("place"))))
        row = {
            "bundles": of_bundles.name,
            "rejects": of_rejects.name,
            "events": events,
            "outcomes": list(outcomes.items()),
        }
        yield pa.RecordBatch.from_pylist([row], schema=RESULT)

    return keep


class RowFile:
    """A file that exists once it has a row; ``name`` is None before.

    A context manager. Raises `StorageError` where it cannot be written.
    """

    def __init__(self, folder: str, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._writer: Any = None
        self.name: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._writer is None:
            return
        if kind is None:
            with io_errors(self._folder, "written to"):
                self._writer.close()

    def write(self, rows: pa.RecordBatch) -> None:
        """Write the columns of the file; those that ``rows`` lacks are null."""
        if not rows.num_rows:
            return
        with io_errors(self._folder, "written to"):
            if self._writer is None:
                self.name = f"{uuid4().hex}.parquet"
                where, path = opened(below(self._folder, f"{FOLDER}/{self.name}"))
                self._writer = pq.ParquetWriter(path, self._schema, filesystem=where)
            columns = [
                rows.column(one.name)
                if one.name in rows.schema.names
                else pa.nulls(rows.num_rows, one.type)
                for one in self._schema
            ]
            self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))


def rows_in(
    folder: str, names: Iterable[str], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of these files, without the columns that are not wanted."""
    where, path = opened(below(folder, FOLDER))
    for name in names:
        with io_errors(folder, "read"), where.open_input_file(f"{path}/{name}") as file:
            yield from pq.ParquetFile(file).iter_batches(ROWS_MAX, columns=columns)


def frame_of(
    spark: SparkSession, folder: str, names: Sequence[str], schema: pa.Schema
) -> DataFrame:
    """Return the rows of files that tasks have written, read by tasks."""
    return task_per_files(spark, names, lambda some: rows_in(folder, some), schema)


def task_per_files(
    spark: SparkSession,
    names: Sequence[str],
    work: Callable[[Iterable[str]], Iterator[pa.RecordBatch]],
    schema: pa.Schema,
) -> DataFrame:
    """Return what ``work`` yields for the files, which are dealt out to tasks."""
    tasks = max(min(len(names), parallelism(spark)), 1)
    frame = task_frame(spark, [names[task::tasks] for task in range(tasks)])
    return frame.mapInArrow(lambda batches: work(taken_work(batches)), spark_ddl(schema))
