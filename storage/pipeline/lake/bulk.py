"""Many rows at once: tasks of Spark read ranges of the store and write the files of a commit.

The driver then commits all files together. Tasks read in snapshots of their own. They leave out
events after the end of the pass. Later changes are in the facts of the next pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from storage.config import Config
from storage.database.arrow_results import ArrowConnection, arrow_snapshot
from storage.pipeline.failures import executor_errors
from storage.pipeline.lake.delta_table import LakeTable
from storage.pipeline.lake.event_rows import event_rows
from storage.pipeline.lake.files import FILE_ROWS, WrittenFile, write_rows
from storage.pipeline.lake.room_rows import ROOMS_PER_STATEMENT, room_rows
from storage.pipeline.lake.tables import EVENTS, TABLES
from storage.pipeline.source.filters import Chosen, by_position, split
from storage.pipeline.source.rows import spark_ddl
from storage.pipeline.source.token_bounds import Bounds

RESULT: Final = pa.schema([("result", pa.string())])
FEW_ROOMS: Final = 2_000
"""Up to so many rooms are read without Spark."""


@dataclass(frozen=True, slots=True)
class BulkTask:
    """Reads a range of a table, and writes files: stream orderings for events, else room nids."""

    dsn: str = field(repr=False)  # it may contain a password
    folder: str
    table: str
    within: Bounds
    config: Config = field(default_factory=Config.from_env)

    def results(self, begin: int, end: int) -> Iterator[str]:
        """Yield each file, and the nids of readmitted events, which it leaves out, as JSON."""
        with arrow_snapshot(self.dsn, config=self.config) as conn:
            for rows in self._rows(conn, begin, end):
                if self.table == EVENTS.name:
                    is_new = pc.equal(rows.column("arrived"), rows.column("stream_ordering"))
                    readmitted = rows.filter(pc.invert(is_new)).column("event_nid").to_pylist()
                    yield orjson.dumps({"readmitted": readmitted}).decode()
                    found = rows.filter(is_new)
                else:
                    found = rows
                if found.num_rows:
                    for file in write_rows(self.folder, TABLES[self.table], found):
                        yield orjson.dumps({"file": asdict(file)}).decode()

    def _rows(self, conn: ArrowConnection, begin: int, end: int) -> Iterator[pa.Table]:
        if self.table == EVENTS.name:
            held: list[pa.Table] = []
            for nids in by_position(conn, begin, end, self.within, Chosen(outliers=False)):
                held += event_rows(conn, nids)
                if sum(one.num_rows for one in held) >= FILE_ROWS:
                    yield pa.concat_tables(held)
                    held.clear()
            if held:
                yield pa.concat_tables(held)
            return
        for first, after in split(begin, end - 1, max((end - begin) // FEW_ROOMS, 1)):
            yield pa.concat_tables(
                room_rows(conn, TABLES[self.table], range(low, high), self.within)
                for low, high in split(
                    first, after - 1, max((after - first) // ROOMS_PER_STATEMENT, 1)
                )
            )


@dataclass(frozen=True, slots=True)
class MirrorTasks:
    """Runs such tasks, at most ``tasks`` at once; without Spark one after another."""

    spark: SparkSession | None
    dsn: str = field(repr=False)
    tasks: int
    config: Config

    def events(self, window: Bounds, folder: str) -> tuple[list[WrittenFile], list[int]]:
        """Write the events of a window; return the files, and the nids of readmitted events."""
        task = BulkTask(self.dsn, folder, EVENTS.name, window, self.config)
        ranges = list(split(window.after + 1, window.upto, self.tasks))
        return _results(self._run(task, ranges))

    def rooms(self, lake: LakeTable, first: int, last: int, within: Bounds) -> list[WrittenFile]:
        """Write the rows of all rooms with nids from ``first`` to ``last``."""
        task = BulkTask(self.dsn, lake.folder, lake.table.name, within, self.config)
        if last - first < FEW_ROOMS:
            return _results(task.results(first, last + 1))[0]
        return _results(self._run(task, list(split(first, last, self.tasks))))[0]

    def _run(self, task: BulkTask, ranges: Sequence[tuple[int, int]]) -> list[str]:
        if self.spark is None:
            return [line for span in ranges for line in task.results(*span)]

        def write(batches: Any) -> Any:
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    found = list(task.results(*ranges[index]))
                    yield pa.RecordBatch.from_pydict({"result": found}, schema=RESULT)

        frame = self.spark.range(0, len(ranges), 1, max(len(ranges), 1))
        with executor_errors():
            return [row["result"] for row in frame.mapInArrow(write, spark_ddl(RESULT)).collect()]


def _results(lines: Any) -> tuple[list[WrittenFile], list[int]]:
    files: list[WrittenFile] = []
    readmitted: list[int] = []
    for line in lines:
        found = orjson.loads(line)
        if "file" in found:
            files.append(WrittenFile(**found["file"]))
        else:
            readmitted += found["readmitted"]
    return files, readmitted
