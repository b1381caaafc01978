"""`room-storage import`: import PDUs from NDJSON and Parquet files."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from storage.cli.common import DsnOption, ExitCode, JsonOption, ServerNameOption, print_values
from storage.cli.interrupt import AGAIN, run
from storage.config import Config
from storage.database.deployment import NO_SERVER
from storage.errors import InputError
from storage.importing import Import, Rejects, Summary
from storage.importing.reading import check_readable
from storage.store.open import open_store

INSTANCE_NAME = "import"
STORED = f"stored events stay; {AGAIN}"
OUTCOMES = (
    "stored",
    "duplicate",
    "rejected",
    "soft_failed",
    "redacted",
    "missing_parents",
    "invalid",
    "bad_line",
)


def command(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="NDJSON or Parquet (*.parquet); - for standard input.",
            show_default=False,
        ),
    ],
    *,
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    instance_name: Annotated[
        str, typer.Option(metavar="NAME", help="The name of this process; it must be unique.")
    ] = INSTANCE_NAME,
    rejects: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A file for lines that were not stored, with the reason (NDJSON)."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Store the PDUs of files.

    An NDJSON line is a PDU, or {"pdu": …, "room_version": …, "origin": …, "state_before": […]};
    Parquet has these columns. A line whose dependencies come later is tried again at the end. After
    an interrupt, run it again: stored events stay.
    """
    sizes = [check_readable(file) for file in files]
    with ExitStack() as stack:
        target = None if rejects is None else stack.enter_context(_opened(rejects))
        bar = stack.enter_context(Bar(None if None in sizes else sum(size or 0 for size in sizes)))
        names = (server_name or NO_SERVER, instance_name)
        summary, seconds = run(_import(files, dsn, names, Rejects(target), bar), STORED)
    print_values(summary_values(summary, seconds), as_json=as_json)
    if findings(summary):
        raise typer.Exit(ExitCode.FINDINGS)


def summary_values(summary: Summary, seconds: float) -> dict[str, object]:
    """Return the summary: lines, each outcome, lines that were not stored, and the duration."""
    return {
        "lines": summary.lines,
        **{outcome: summary.outcomes[outcome] for outcome in OUTCOMES},
        "rejects": findings(summary),
        "rounds": summary.rounds,
        "seconds": round(seconds, 3),
        "lines_per_second": round(summary.lines / seconds) if seconds else 0,
    }


def findings(summary: Summary) -> int:
    """Return how many lines were not stored."""
    return sum(summary.outcomes[outcome] for outcome in ("missing_parents", "invalid", "bad_line"))


async def _import(
    files: list[str], dsn: str | None, names: tuple[str, str], rejects: Rejects, bar: "Bar"
) -> tuple[Summary, float]:
    server_name, instance_name = names
    async with open_store(
        dsn, server_name=server_name, instance_name=instance_name, config=Config.from_env()
    ) as store:
        if store.server_name == NO_SERVER:
            typer.echo(
                "note: without --server-name no user is local,"
                " so the rooms will not appear in any user's sync",
                err=True,
            )
        started = time.monotonic()
        summary = await Import(store, rejects, progress=bar).run(files)
        return summary, time.monotonic() - started


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("wb")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


class Bar:
    """A progress bar on standard error; nothing where that is no terminal."""

    def __init__(self, total_bytes: int | None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[lines]:,} lines"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("importing", total=total_bytes, lines=0)
        self._lines = 0
        self._again = False

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def lines_done(self, count: int, size: int) -> None:
        """See `storage.importing.run.Progress`."""
        self._lines += count
        self._progress.update(self._task, advance=count if self._again else size, lines=self._lines)

    def round_begins(self, lines: int) -> None:
        """See `storage.importing.run.Progress`."""
        self._again = True
        self._lines = 0
        self._task = self._progress.add_task("trying again", total=lines, lines=0)
