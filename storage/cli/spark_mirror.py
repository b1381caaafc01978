"""`room-storage spark mirror`: tables that stay true, for those who count and learn."""

import importlib
from collections import Counter
from typing import Annotated, Any

import typer

from storage.cli.common import DsnOption, JsonOption
from storage.cli.interrupt import AGAIN
from storage.cli.output import print_values
from storage.cli.spark_session import (
    KEPT_HOURS,
    LOCAL,
    ConfOption,
    KeepOption,
    MasterOption,
    TasksOption,
    folder_option,
    opened_session,
    pipeline,
)

TablesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="TABLE...",
        help="events, state_changes, memberships, visibility, rooms, or all.",
        show_default=False,
    ),
]
FolderOption = Annotated[str, folder_option("--to", "The folder of the tables, local or at a URL.")]
OnceOption = Annotated[
    bool, typer.Option("--once", help="End when the tables have what the store has now.")
]
CompareOption = Annotated[
    bool,
    typer.Option("--compare", help="First compare all rows with the store, as after a restore."),
]
EveryOption = Annotated[
    float,
    typer.Option("--every", min=0, metavar="SECONDS", help="The time between two rounds."),
]
BatchOption = Annotated[
    int, typer.Option("--batch", min=1, help="The maximum number of new events in a commit.")
]


def command(
    tables: TablesArgument,
    to: FolderOption,
    dsn: DsnOption = None,
    *,
    once: OnceOption = False,
    compare: CompareOption = False,
    every: EveryOption = 1.0,
    keep: KeepOption = KEPT_HOURS,
    batch: BatchOption = 200_000,
    tasks: TasksOption = None,
    master: MasterOption = LOCAL,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep tables of Delta Lake equal to the store; run it again to go on.

    Redactions, purges and erasures change and delete rows.
    """
    pipeline()
    importlib.import_module("storage.pipeline.mirroring").require_lake()
    importlib.import_module("storage.pipeline.lake.tables").chosen_tables(tuple(tables))
    counted: Counter[str] = Counter()

    def report(made: Any) -> None:
        counted.update({"commits": 1, "rows": made.rows, "replaced": made.replaced})
        if not once and not as_json:
            typer.echo(
                f"{made.table} {made.version}: {made.rows:,} rows, {made.replaced:,} replaced,"
                f" {made.seconds:.1f} s",
                err=True,
            )

    with opened_session(dsn, master, conf, AGAIN) as (spark, target):
        pipeline().mirror(
            spark,
            target,
            to,
            tuple(tables),
            once=once,
            compare=compare,
            every_s=every,
            keep_hours=keep,
            batch=batch,
            tasks=tasks or 8,
            report=report,
        )
    values = {name: counted[name] for name in ("commits", "rows", "replaced")}
    print_values(values, as_json=as_json)
