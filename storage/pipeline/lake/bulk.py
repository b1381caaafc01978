"""Many rows at once: tasks of Spark read ranges of the store and write the files of a commit.

The driver then commits all files together. Tasks read in snapshots of their own. They leave out
events after the end of the pass. Later changes are in the facts of the next pass. Other tasks merge
files of a table.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from storage.config import Config
from storage.database.arrow_results import ArrowConnection, arrow_snapshot
from storage.pipeline.failures import executor_errors
from storage.pipeline.lake.compaction import merged
from storage.pipeline.lake.delta_table import LakeTable
from storage.pipeline.lake.event_rows import event_rows
from storage.pipeline.lake.files import MirrorFile, gathered, write_rows
from storage.pipeline.lake.room_rows import ROOMS_PER_STATEMENT, room_rows
from storage.pipeline.lake.tables import EVENTS, TABLES, MirrorTable
from storage.pipeline.source.filled_ranges import SQL_FIRST_ROOM, filled
from storage.pipeline.source.filters import Chosen, by_position, split
from storage.pipeline.source.rows import spark_ddl
from storage.pipeline.source.token_bounds import Bounds

RESULT: Final = pa.schema([("result", pa.string())])
FEW_ROOMS: Final = 2_000
"""Up to so many rooms are read without Spark."""
FEW_ROWS: Final = 20_000
"""Fewer rows are merged without Spark."""


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
            pages = by_position(conn, begin, end, self.within, Chosen(outliers=False))
            return gathered(rows for nids in pages for rows in event_rows(conn, nids))
        steps = filled(conn, SQL_FIRST_ROOM, begin, end, ROOMS_PER_STATEMENT)
        return gathered(
            room_rows(conn, TABLES[self.table], range(low, high), self.within)
            for low, high in steps
        )


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Merges files of a table."""

    folder: str
    table: str

    def results(self, *paths: str) -> Iterator[str]:
        """Yield each file that has the rows of these, as JSON."""
        for file in merged(self.folder, TABLES[self.table], paths):
            yield orjson.dumps({"file": asdict(file)}).decode()


@dataclass(frozen=True, slots=True)
class MirrorTasks:
    """Runs such tasks; without Spark one after another. At most ``tasks`` read the store."""

    spark: SparkSession | None
    dsn: str = field(repr=False)
    tasks: int
    config: Config

    def events(self, window: Bounds, folder: str) -> tuple[list[MirrorFile], list[int]]:
        """Write the events of a window; return the files, and the nids of readmitted events."""
        task = BulkTask(self.dsn, folder, EVENTS.name, window, self.config)
        ranges = list(split(window.after + 1, window.upto, self.tasks))
        return _results(self._run(task.results, ranges))

    def rooms(self, lake: LakeTable, first: int, last: int, within: Bounds) -> list[MirrorFile]:
        """Write the rows of all rooms with nids from ``first`` to ``last``."""
        task = BulkTask(self.dsn, lake.folder, lake.table.name, within, self.config)
        if last - first < FEW_ROOMS:
            return _results(task.results(first, last + 1))[0]
        return _results(self._run(task.results, list(split(first, last, self.tasks))))[0]

    def merged(
        self, folder: str, table: MirrorTable, groups: Sequence[Sequence[MirrorFile]]
    ) -> list[MirrorFile]:
        work = MergeTask(folder, table.name).results
        parts = [tuple(file.path for file in group) for group in groups]
        if sum(file.rows for group in groups for file in group) < FEW_ROWS:
            return _results(line for paths in parts for line in work(*paths))[0]
        return _results(self._run(work, parts))[0]

    def _run(
        self, work: Callable[..., Iterator[str]], parts: Sequence[tuple[Any, ...]]
    ) -> Iterable[str]:
        """Yield the results of all parts, each the arguments of one task."""
        if self.spark is None:
            return (line for part in parts for line in work(*part))

        def write(batches: Any) -> Any:
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    found = list(work(*parts[index]))
                    yield pa.RecordBatch.from_pydict({"result": found}, schema=RESULT)

        frame = self.spark.range(0, len(parts), 1, max(len(parts), 1))
        with executor_errors():
            return [row["result"] for row in frame.mapInArrow(write, spark_ddl(RESULT)).collect()]


def _results(lines: Iterable[str]) -> tuple[list[MirrorFile], list[int]]:
    files: list[MirrorFile] = []
    readmitted: list[int] = []
    for line in lines:
        found = orjson.loads(line)
        if "file" in found:
            files.append(MirrorFile(**found["file"]))
        else:
            readmitted += found["readmitted"]
    return files, readmitted
