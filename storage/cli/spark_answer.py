"""`room-storage spark answer`: questions about a mirror, counted again where it has changed."""

import importlib
from typing import Annotated

import typer

from storage.cli.common import JsonOption, amount, print_json, print_rows
from storage.cli.interrupt import AGAIN
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
        found = pipeline().answers(
            spark,
            mirror,
            tuple(questions),
            folder=to,
            full=full,
            tasks=tasks or 8,
            keep_hours=keep,
        )
        for name, answer in found.items():
            if output is not None:
                answer.rows.write.mode("overwrite").parquet(f"{output.rstrip('/')}/{name}")
            rows = [row.asDict() for row in answer.rows.limit(limit).collect()]
            shown[name] = {"days": answer.days, "days_read": answer.days_read, "rows": rows}
            if not as_json:
                columns = answer.rows.columns
                print_rows(name, columns, [list(row.values()) for row in rows], as_json=False)
                days = amount(answer.days, "day")
                cut = f"; the first {amount(limit, 'row')}" if len(rows) == limit else ""
                typer.echo(f"{name}: {answer.days_read} of {days} counted again{cut}")
    if as_json:
        print_json(shown)
