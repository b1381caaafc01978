"""`answers`: the questions that people ask of a mirror, each refreshed by the days that changed.

Needs the extra `lake`, and a mirror (`storage.pipeline.mirror`). The work is in
`storage.pipeline.lake.answering`.
"""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from storage.errors import InputError
from storage.pipeline.lake.questions import chosen_questions
from storage.pipeline.mirroring import lake_module


@dataclass(frozen=True, slots=True)
class MirrorAnswer:
    """An answer: ``rows`` is a data frame of Spark, read from the daily table when it is used.

    ``days``: those of the mirror; ``days_read``: those that the refresh has counted again;
    ``files_read``: the files of the mirror that these days have; ``version``: of its `events`.
    """

    question: str
    rows: DataFrame
    version: int
    days: int
    days_read: int
    files_read: int


def answers(
    spark: SparkSession,
    path: str,
    questions: tuple[str, ...] = ("all",),
    *,
    folder: str | None = None,
    full: bool = False,
    tasks: int = 8,
    keep_hours: int = 168,
) -> dict[str, MirrorAnswer]:
    """Answer ``questions`` from the mirror in the folder ``path``; return each by its name.

    ``questions``: names of `QUESTIONS`, or "all". A question is a query on a daily table, which is
    kept in ``folder`` (default: "answers" in that of the mirror). A call counts those days again
    whose files in the mirror have changed since the last one, and no others. The result is that of
    a ``full`` one, which counts all days. ``tasks``: those of Spark that write. ``keep_hours``: so
    long old versions of the daily tables stay.

    Raise `ExtraMissing`, `InputError` where there is no mirror or no such question, or
    `StorageError` if another process refreshes at the same time.
    """
    if tasks < 1 or keep_hours < 0:
        raise InputError("tasks is 1 or more; keep_hours 0 or more")
    names = tuple(question.name for question in chosen_questions(questions))
    answers_folder = folder or f"{path.rstrip('/')}/answers"
    run: Any = lake_module("answering").run
    by_question: dict[str, MirrorAnswer] = run(
        spark, path, names, answers_folder, full=full, tasks=tasks, keep_hours=keep_hours
    )
    return by_question
