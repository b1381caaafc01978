"""Refresh the daily tables of answers, and read the answers from them.

A refresh reads the files of the changed days at one version of the mirror, and replaces the rows of
these days in one commit. Tasks of Spark write the files. After a crash no commit names them.
"""

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import orjson
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from storage.errors import InputError
from storage.pipeline.answers import MirrorAnswer
from storage.pipeline.lake.bulk import RESULT
from storage.pipeline.lake.delta_table import MirrorFile, folder_of, gathered, url_of, write_rows
from storage.pipeline.lake.event_rows import AnswerState, DayTable, MirroredDays
from storage.pipeline.lake.questions import DAILY, Question, chosen_questions, definition, frame_of
from storage.pipeline.lake.tables import EVENTS, MirrorTable
from storage.pipeline.session import executor_errors
from storage.pipeline.source.rows import spark_ddl

FEW_EVENTS: Final = 200_000
"""A daily table has no more rows than events: from so few, this process takes them."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """A refresh of daily tables in ``folder`` from the mirror at ``path``, at one version."""

    spark: SparkSession
    path: str
    folder: str
    source: MirroredDays
    tasks: int
    keep_hours: int
    full: bool

    def table(self, question: Question) -> tuple[DayTable, set[str]]:
        """Refresh the daily table of a question; return it, and the days that were read."""
        daily = DAILY[question.daily]
        table = DayTable.open(folder_of(self.folder, daily), daily, self.keep_hours)
        new_state = AnswerState(
            self.source.source, self.source.version, definition(question.daily_query)
        )
        state = table.state()
        if state == new_state and not self.full:
            table.vacuum(self.keep_hours)
            return table, set()
        read_days = None if self.full else self._read_days(state, new_state)
        if read_days is None:
            days, replaced = set(self.source.files), None
        else:
            days = replaced = self.source.changed_since(read_days)
        files = self._write(table, question.daily_query, days) if days else []
        table.replace(replaced, files, new_state)
        table.vacuum(self.keep_hours)
        return table, days

    def _read_days(self, state: AnswerState | None, new_state: AnswerState) -> MirroredDays | None:
        """Return the days that the table has read; None if all have to be read again."""
        if state is None or (state.source, state.definition) != (
            new_state.source,
            new_state.definition,
        ):
            return None
        try:
            return MirroredDays.of(folder_of(self.path, EVENTS), state.version)
        except InputError:  # the log does not go back so far any more
            return None

    def _write(self, table: DayTable, query: str, days: Collection[str]) -> list[MirrorFile]:
        """Count these days and write their rows: here if they are few, else in tasks."""
        below = url_of(folder_of(self.path, EVENTS))
        paths = [f"{below}/{path}" for path in self.source.paths(days)]
        with executor_errors():
            events = frame_of(self.spark, EVENTS, below, paths)
            counted = self.spark.sql(query, events=events).select(*table.table.schema.names)
            if sum(self.source.rows.get(day, 0) for day in days) <= FEW_EVENTS:
                return list(_written(table.folder, table.table, iter([counted.toArrow()])))
            parts = counted.repartition(min(len(days), self.tasks), "day")
            return _written_by_tasks(table.folder, table.table, parts.sortWithinPartitions("day"))


def _written_by_tasks(folder: str, table: MirrorTable, rows: DataFrame) -> list[MirrorFile]:
    def write(batches: Any) -> Any:
        for file in _written(folder, table, (pa.Table.from_batches([batch]) for batch in batches)):
            line = orjson.dumps(asdict(file)).decode()
            yield pa.RecordBatch.from_pydict({"result": [line]}, schema=RESULT)

    lines = rows.mapInArrow(write, spark_ddl(RESULT)).collect()
    return [MirrorFile(**orjson.loads(line["result"])) for line in lines]


def _written(folder: str, table: MirrorTable, batches: Iterator[pa.Table]) -> Iterator[MirrorFile]:
    """Write rows, which come in order of their days if they come in several parts."""
    for rows in gathered(batch.select(table.schema.names).cast(table.schema) for batch in batches):
        yield from write_rows(folder, table, rows)


def run(
    spark: SparkSession,
    path: str,
    names: tuple[str, ...],
    folder: str,
    *,
    full: bool,
    tasks: int,
    keep_hours: int,
) -> dict[str, MirrorAnswer]:
    """Refresh and answer; see `storage.pipeline.answers`."""
    questions = chosen_questions(names)
    source = MirroredDays.of(folder_of(path, EVENTS))
    refresh = Refresh(spark, path, folder, source, tasks, keep_hours, full)
    done: dict[str, tuple[DayTable, set[str]]] = {}
    mirror_answers = {}
    for question in questions:
        if question.daily not in done:
            done[question.daily] = refresh.table(question)
        table, read = done[question.daily]
        frames: dict[str, Any] = {question.daily: _frame(spark, table)}
        rows = spark.sql(question.query, **frames)
        mirror_answers[question.name] = MirrorAnswer(
            question.name,
            rows,
            source.version,
            len(source.files),
            len(read),
            len(source.paths(read)),
        )
    return mirror_answers


def _frame(spark: SparkSession, table: DayTable) -> DataFrame:
    folder = url_of(table.folder)
    return frame_of(spark, table.table, folder, [f"{folder}/{path}" for path in table.paths()])
