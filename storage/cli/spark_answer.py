"""`room-storage spark answer`: questions about a mirror, counted again where it has changed."""

import importlib
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from storage.cli.common import JsonOption
from storage.cli.interrupt import AGAIN
from storage.cli.output import amount, print_json, print_rows
from storage.cli.spark_session import (
    KEPT_HOURS,
    LOCAL,
    ConfOption,
    KeepOption,
    MasterOption,
    TasksOption,
    folder_option,
    pipeline,
    session_alone,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FORECAST: Final = "forecast"
"""The column of an answer in the order of days, which says that a day is still to come."""

QuestionsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="QUESTION...",
        help="activity, retention, joins, bodies, fan_out, redactions, servers, media, growth,"
        " or all.",
        show_default=False,
    ),
]
MirrorOption = Annotated[
    str,
    folder_option(
        "--mirror", "The folder of the mirror, local or at a URL; `events` has to be in it."
    ),
]
AnswersOption = Annotated[
    str | None,
    folder_option(
        "--to", "The folder of the daily tables; default: answers in that of the mirror."
    ),
]
OutputOption = Annotated[
    str | None,
    folder_option("--output", "A folder for the whole answers, as Parquet below QUESTION."),
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Count all days again, not only those that changed.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Rows printed for a question.")]


def command(
    questions: QuestionsArgument,
    mirror: MirrorOption,
    to: AnswersOption = None,
    *,
    output: OutputOption = None,
    full: FullOption = False,
    limit: LimitOption = 20,
    keep: KeepOption = KEPT_HOURS,
    tasks: TasksOption = None,
    master: MasterOption = LOCAL,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer questions from a mirror; only days that changed since the last time are counted again.

    It needs no database. The reference page of the questions has their queries.
    """
    pipeline()
    importlib.import_module("storage.pipeline.mirroring").require_lake()
    importlib.import_module("storage.pipeline.lake.questions").chosen_questions(tuple(questions))
    shown = {}
    with session_alone(master, conf, AGAIN) as spark:
        answers = pipeline().answers(
            spark,
            mirror,
            tuple(questions),
            folder=to,
            full=full,
            tasks=tasks or 8,
            keep_hours=keep,
        )
        for name, answer in answers.items():
            if output is not None:
                answer.rows.write.mode("overwrite").parquet(f"{output.rstrip('/')}/{name}")
            if as_json:
                rows = [row.asDict() for row in answer.rows.limit(limit).collect()]
                shown[name] = {"days": answer.days, "days_read": answer.days_read, "rows": rows}
            else:
                cut = _print(name, answer.rows, limit)
                days = amount(answer.days, "day")
                typer.echo(f"{name}: {answer.days_read} of {days} counted again{cut}")
    if as_json:
        print_json(shown)


def _print(name: str, answer: "DataFrame", limit: int) -> str:
    """Print so many rows, and return which."""
    if FORECAST in answer.columns:
        every = [row.asDict() for row in answer.collect()]  # a row for each day
        rows = newest_and_forecast(every, limit)
        left = len(every) - len(rows)
        cut = f"; {amount(left, 'row')} of other days left out" if left else ""
    else:
        rows = [row.asDict() for row in answer.limit(limit).collect()]
        cut = f"; the first {amount(limit, 'row')}" if len(rows) == limit else ""
    print_rows(name, answer.columns, [list(row.values()) for row in rows], as_json=False)
    return cut


def newest_and_forecast(rows: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return the newest days, and as many of the forecast at equal distances, the last among them.

    ``rows`` are in the order of days.
    """
    counted = [row for row in rows if not row[FORECAST]]
    forecast = [row for row in rows if row[FORECAST]]
    step = max(-(-len(forecast) // max(limit // 2, 1)), 1)
    shown = forecast[::-step][::-1] if limit > 1 else []
    return [*counted[-(limit - len(shown)) :], *shown]
