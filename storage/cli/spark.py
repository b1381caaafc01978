"""`room-storage spark …`: bulk work that outgrows one process.

It needs the extra `spark` and Java 17, and checks for both first.
"""

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from storage.cli import spark_answer, spark_demo, spark_mirror
from storage.cli.common import (
    DsnOption,
    JsonOption,
    ProgressDisplay,
    QuietOption,
    RoomsOption,
    ServerNameOption,
    synapse_dsn_of,
)
from storage.cli.interrupt import UNCHANGED, interruptible
from storage.cli.output import (
    ExitCode,
    PlainCommand,
    PlainGroup,
    amount,
    print_json,
    print_rows,
    print_values,
)
from storage.cli.spark_session import (
    LOCAL,
    ConfOption,
    MasterOption,
    TasksOption,
    opened_session,
    pipeline,
    setting,
)
from storage.errors import InputError
from storage.observability.counters import Progress

# --------------------------------------------------------------------------------------------------
# Progress of Spark's jobs: the tasks that are done, of those of the running stages.

POLL_SECONDS: Final = 1.0


@contextmanager
def tasks_shown(spark: Any, *, quiet: bool) -> Iterator[None]:
    """Show during the block how many tasks are done. A task takes several rooms."""
    if quiet:
        yield
        return
    ended = threading.Event()
    with ProgressDisplay() as show:
        thread = threading.Thread(target=_watch, args=(spark, show, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _watch(spark: Any, show: ProgressDisplay, ended: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    while not ended.wait(POLL_SECONDS):
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        running = [stage for stage in stages if stage is not None]
        if total := sum(stage.numTasks for stage in running):
            done = sum(stage.numCompletedTasks for stage in running)
            show(Progress("spark", done, total, "tasks"))


app: typer.Typer = typer.Typer(
    cls=PlainGroup,
    help="Bulk work on Spark: import, export, rebuild, verify, statistics, stream, mirror, answer.",
    no_args_is_help=True,
)
app.command("mirror", cls=PlainCommand)(spark_mirror.command)
app.command("answer", cls=PlainCommand)(spark_answer.command)

RoomVersionOption = Annotated[
    str | None,
    typer.Option(
        "--room-version", help="The version of rooms whose version is unknown.", show_default=False
    ),
]
KeysOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-key",
        metavar="'SERVER KEY_ID KEY'",
        help=(
            "A server's verify key; may be given several times."
            " With any, signatures are checked, and only with these keys."
        ),
        show_default=False,
    ),
]
RejectsOption = Annotated[
    str | None,
    typer.Option("--rejects", help="A folder for events that were not stored, as Parquet."),
]
WorkOption = Annotated[
    str | None,
    typer.Option(
        "--work",
        help=(
            "A folder on a shared file system that all executors reach, or a URL;"
            " default: a temporary one."
        ),
    ),
]
WritersOption = Annotated[
    str, typer.Option("--instance-name", help="Tasks write as NAME-0, NAME-1, ….")
]
SHOWN_MAX: Final = 1_000
PROGRESS_MAX: Final = 1_000_000


@app.command("import", cls=PlainCommand)
def import_(
    files: Annotated[
        list[str],
        typer.Argument(help="NDJSON, Parquet, or /backfill responses: files, or folders of them."),
    ],
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    *,
    rejects: RejectsOption = None,
    work: WorkOption = None,
    instance_name: WritersOption = "spark",
    allow_key: KeysOption = None,
    room_version: RoomVersionOption = None,
    tasks: TasksOption = None,
    master: MasterOption = LOCAL,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store archives, several rooms in parallel.

    Exit code 1 if an event was not stored; run it again after an interruption.
    """
    started = time.monotonic()
    with opened_session(dsn, master, conf) as (spark, target):
        summary = pipeline().import_archive(
            spark,
            files,
            target,
            server_name=server_name,
            rejects=rejects,
            work=work,
            instance_name=instance_name,
            room_version=room_version,
            verify_keys=_keys(allow_key),
            writers=tasks,
            stage=_print_stage,
        )
    _print_summary(summary, started, as_json=as_json)


@app.command("import-synapse", cls=PlainCommand)
def import_synapse(
    synapse_dsn: Annotated[
        str | None,
        typer.Argument(
            metavar="SYNAPSE_DSN",
            callback=synapse_dsn_of,
            help=(
                "The database of a Synapse, postgresql://…; it is never written."
                " Default: STORAGE_SYNAPSE_DSN, else the line of the file"
                " STORAGE_SYNAPSE_DSN_FILE."
            ),
            show_default=False,
        ),
    ] = None,
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    *,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="A checkpoint file: the next import takes only new events.",
        ),
    ] = None,
    rejects: RejectsOption = None,
    work: WorkOption = None,
    instance_name: WritersOption = "spark",
    allow_key: KeysOption = None,
    room_version: RoomVersionOption = None,
    tasks: TasksOption = None,
    master: MasterOption = LOCAL,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store the rooms of a running Synapse; run it again until you switch over.

    Exit code 1 if an event was not stored.
    """
    started = time.monotonic()
    with opened_session(dsn, master, conf) as (spark, target):
        summary = pipeline().import_synapse(
            spark,
            synapse_dsn,
            target,
            memory=memory,
            server_name=server_name,
            rejects=rejects,
            work=work,
            instance_name=instance_name,
            room_version=room_version,
            verify_keys=_keys(allow_key),
            writers=tasks,
            stage=_print_stage,
        )
    _print_summary(summary, started, as_json=as_json)


@app.command("export", cls=PlainCommand)
def export(
    path: Annotated[str, typer.Argument(help="The folder to write to.")],
    dsn: DsnOption = None,
    *,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", help='The token of an earlier export, or "last": continue from it.'
        ),
    ] = None,
    tasks: TasksOption = None,
    master: MasterOption = LOCAL,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write events, state deltas and visibility as Parquet, and read them back."""
    with opened_session(dsn, master, conf) as (spark, target):
        last = (
            importlib.import_module("storage.pipeline.export").last_export(path)
            if since == "last"
            else None
        )
        token = (None if last is None else last.upto) if since == "last" else since
        made = pipeline().export_parquet(spark, target, path, since=token, partitions=tasks or 8)
    print_values(asdict(made), as_json=as_json)


@app.command("verify", cls=PlainCommand)
def verify(
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    *,
    room: RoomsOption = None,
    output: Annotated[
        str | None, typer.Option("--output", help="A folder for the findings, as Parquet.")
    ] = None,
    tasks: TasksOption = None,
    master: MasterOption = LOCAL,
    conf: ConfOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Recompute everything derived, several rooms in parallel; exit code 1 with findings."""
    with (
        opened_session(dsn, master, conf, UNCHANGED) as (spark, target),
        tasks_shown(spark, quiet=quiet),
    ):
        findings = (
            pipeline()
            .verify(spark, target, room_ids=room, server_name=server_name, tasks=tasks)
            .cache()
        )
        count, columns = findings.count(), findings.columns
        if output is not None:
            findings.write.mode("overwrite").parquet(output)
        rows = [row.asDict() for row in findings.limit(SHOWN_MAX).collect()]
    if as_json:
        print_json({"findings": rows, "count": count})
    else:
        print_rows("Findings", columns, [list(row.values()) for row in rows], as_json=False)
        typer.echo(amount(count, "finding") if count else "nothing found")
    if count:
        raise typer.Exit(ExitCode.FINDINGS)


@app.command("rebuild", cls=PlainCommand)
def rebuild(
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    *,
    room: RoomsOption = None,
    tasks: TasksOption = None,
    master: MasterOption = LOCAL,
    conf: ConfOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rebuild everything that follows from the received bytes, while others write.

    Exit code 1 if a room could not be rebuilt.
    """
    with opened_session(dsn, master, conf) as (spark, target), tasks_shown(spark, quiet=quiet):
        failed = pipeline().rebuild(
            spark, target, room_ids=room, server_name=server_name, tasks=tasks
        )
    print_rows("Not rebuilt", ["room", "reason"], list(failed.items()), as_json=as_json)
    if failed:
        raise typer.Exit(ExitCode.FINDINGS)


@app.command("statistics", cls=PlainCommand)
def statistics(
    path: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY", help="The folder for the tables, as Parquet, and for index.html."
        ),
    ],
    dsn: DsnOption = None,
    *,
    top: Annotated[
        int, typer.Option("--top", min=1, help="The number of rooms in each list, and of types.")
    ] = 10,
    tasks: TasksOption = None,
    master: MasterOption = LOCAL,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count rooms, events, bytes, growth, states and forks: as Parquet, and as a page with plots.

    You can open the page anywhere.
    """
    with opened_session(dsn, master, conf) as (spark, target):
        summary = pipeline().statistics(
            spark, target, path, top=top, partitions=tasks or 8, stage=_print_stage
        )
    if as_json:
        print_json(asdict(summary))
        return
    print_values(
        {name.replace("_", " "): f"{value:,}" for name, value in summary.totals.items()},
        as_json=False,
    )
    for title, columns, rows in (
        ("Events per type", ["type", "events", "bytes"], summary.types),
        ("Largest states", ["name", "room_id", "state_entries", "events"], summary.largest_states),
        (
            "Most forked rooms",
            ["name", "room_id", "merges", "forward_extremities", "events"],
            summary.most_forked,
        ),
    ):
        print_rows(title, columns, [[row[name] for name in columns] for row in rows], as_json=False)
    typer.echo(f"tables and plots: {path.rstrip('/')}/index.html")


@app.command("stream", cls=PlainCommand)
def stream(
    path: Annotated[
        Path,
        typer.Argument(
            help="The folder to write Parquet to; its folder _checkpoint has the progress."
        ),
    ],
    dsn: DsnOption = None,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="End when the current events are written.")
    ] = False,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="The maximum number of events in a batch.")
    ] = 100_000,
    tasks: TasksOption = None,
    master: MasterOption = LOCAL,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow the streams of events and write them as Parquet; run it again to resume."""
    with opened_session(dsn, master, conf) as (spark, target):
        options = {"dsn": target, "maxEventsPerBatch": str(batch), "partitions": str(tasks or 2)}
        frame = spark.readStream.format("room_events").options(**options).load()
        # Progress of all batches is counted below; the default keeps the last hundred.
        spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", PROGRESS_MAX)
        writing = (
            frame.writeStream.format("parquet")
            .option("path", str(path))
            .option("checkpointLocation", str(path / "_checkpoint"))
        )
        query = (
            writing.trigger(availableNow=True)
            if once
            else writing.trigger(processingTime="1 second")
        ).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()
        batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
        events = sum(progress["numInputRows"] for progress in batches)
    print_values({"events": events, "batches": len(batches)}, as_json=as_json)


@app.command("demo", cls=PlainCommand)
def demo(master: MasterOption = "local[2]", conf: ConfOption = None) -> None:
    """Import, export, stream and verify generated rooms, in a separate Postgres."""
    package = pipeline()
    sessions = importlib.import_module("storage.pipeline.session")
    sessions.check_java()
    settings = {"spark.ui.showConsoleProgress": "false"} | dict(
        setting(option) for option in conf or ()
    )
    with interruptible(), sessions.executor_errors():
        spark_demo.show(package, lambda: sessions.session(master, settings))


def _keys(texts: list[str] | None) -> dict[tuple[str, str], Any]:
    """Parse verify keys from texts such as ``example.org ed25519:1 base64``."""
    keys: dict[tuple[str, str], Any] = {}
    if not texts:
        return keys
    examining = importlib.import_module("storage.pipeline.imports.validate")
    for text in texts:
        parts = text.split()
        try:
            server, key_id, key = parts
            keys[server, key_id] = examining.verify_key(key_id, key)
        except ValueError:
            raise InputError(
                f"--allow-key {text!r}: give a server, a key id and the key,"
                " as 'example.org ed25519:1 l8Hft5qXKn1v…'"
            ) from None
    return keys


def _print_summary(summary: Any, started: float, *, as_json: bool) -> None:
    """Print the results of an import.

    Exit with code 1 if an event was not stored.
    """
    seconds = time.monotonic() - started
    values = {
        "lines": summary.lines,
        **dict(sorted(summary.outcomes.items())),
        "rejects": summary.rejects,
        "seconds": round(seconds, 3),
    }
    print_values(values, as_json=as_json)
    if summary.rejects:
        raise typer.Exit(ExitCode.FINDINGS)


def _print_stage(stage: str) -> None:
    typer.echo(f"{stage} …", err=True)
