"""`room-storage import`: import PDUs from NDJSON and Parquet files."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated

import typer

from storage.cli.common import (
    DsnOption,
    JsonOption,
    ProgressDisplay,
    QuietOption,
    ServerNameOption,
    instance_name_option,
    opened_store,
)
from storage.cli.interrupt import AGAIN, run
from storage.cli.output import ExitCode, print_values
from storage.database.deployment import NO_SERVER
from storage.errors import InputError
from storage.importing import Import, Rejects, Summary
from storage.importing.reading import check_readable
from storage.observability.counters import Report

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
    no_local_users: Annotated[
        bool,
        typer.Option(
            "--no-local-users",
            help="Without a server name: the rooms are in nobody's sync.",
        ),
    ] = False,
    instance_name: Annotated[str, instance_name_option()] = INSTANCE_NAME,
    rejects: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A file for lines that were not stored, with the reason (NDJSON)."
        ),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Store the PDUs of files.

    An NDJSON line is a PDU, or {"pdu": …, "room_version": …, "origin": …, "state_before": […]};
    Parquet has these columns. A line whose dependencies come later is tried again at the end. After
    an interrupt, run it again: stored events stay.
    """
    if no_local_users and server_name is not None:
        raise InputError("give one of --server-name and --no-local-users")
    sizes = [check_readable(file) for file in files]
    with ExitStack() as stack:
        target = None if rejects is None else stack.enter_context(_opened(rejects))
        show = stack.enter_context(ProgressDisplay(quiet=quiet))
        total = None if None in sizes else sum(size or 0 for size in sizes)
        names = (server_name or NO_SERVER, instance_name)
        making = _import(
            files,
            dsn,
            names,
            Rejects(target),
            show=show,
            total=total,
            no_local_users=no_local_users,
        )
        summary, seconds = run(making, STORED)
    print_values(summary_values(summary, seconds), as_json=as_json)
    if findings(summary):
        raise typer.Exit(ExitCode.FINDINGS)


def summary_values(summary: Summary, seconds: float) -> dict[str, object]:
    """Return the summary: lines, each outcome, lines that were not stored, and the duration."""
    return {
        "lines": summary.lines,
        **{outcome: summary.outcomes[outcome] for outcome in OUTCOMES},
        "rejects": findings(summary),
        "stray_keys": summary.stray_keys,
        "rounds": summary.rounds,
        "seconds": round(seconds, 3),
        "lines_per_second": round(summary.lines / seconds) if seconds else 0,
    }


def findings(summary: Summary) -> int:
    """Return how many lines were not stored."""
    return sum(summary.outcomes[outcome] for outcome in ("missing_parents", "invalid", "bad_line"))


async def _import(
    files: list[str],
    dsn: str | None,
    names: tuple[str, str],
    rejects: Rejects,
    *,
    show: Report,
    total: int | None,
    no_local_users: bool,
) -> tuple[Summary, float]:
    server_name, instance_name = names
    async with opened_store(dsn, server_name=server_name, instance_name=instance_name) as store:
        if no_local_users and store.server_name != NO_SERVER:
            raise InputError(f"users of {store.server_name} are local: leave --no-local-users out")
        if store.server_name == NO_SERVER and not no_local_users:
            raise InputError(
                "the database has no server name yet: give --server-name NAME, so that its users"
                " are local, or --no-local-users if nobody is to have the rooms in their sync"
            )
        started = time.monotonic()
        summary = await Import(store, rejects, report=show, total_bytes=total).run(files)
        return summary, time.monotonic() - started


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("wb")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
