"""`room-storage censor`: remove redacted content from disk."""

from typing import Annotated, Final

import typer

from storage.cli.archive import DAYS_MAX, print_swept
from storage.cli.common import DsnOption, JsonOption, ProgressDisplay, QuietOption, maintained
from storage.cli.interrupt import AGAIN, UNCHANGED, run
from storage.cli.output import amount, print_json
from storage.maintenance.censor import Censored, censor
from storage.maintenance.cold_archive import Swept, sweep_if_free
from storage.observability.counters import Report

DAY_MS: Final = 86_400_000


def command(
    dsn: DsnOption = None,
    *,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            min=0,
            max=DAYS_MAX,
            help="The age of a redaction; default: STORAGE_CENSOR_AFTER_MS, 7 days.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Replace redacted events by their redacted form, permanently.

    Works in small batches while servers run; run it every day.
    """
    age_ms = None if older_than is None else round(older_than * DAY_MS)
    with ProgressDisplay(quiet=quiet) as show:
        work = _censor(dsn, age_ms, show, dry_run=dry_run)
        done, swept = run(work, UNCHANGED if dry_run else AGAIN)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "censored": done.censored,
                "left": done.left,
                "busy": done.busy,
                "waiting": done.waiting,
                "archive": swept._asdict(),
            }
        )
        return
    _print_censored(done, dry_run=dry_run)
    print_swept(swept)


def _print_censored(done: Censored, *, dry_run: bool) -> None:
    """Print the counts for people; each line has the name that the JSON has."""
    censored = amount(done.censored, "event")
    typer.echo(f"{censored} to be censored" if dry_run else f"{censored} censored")
    if done.left:
        typer.echo(
            f"{done.left:,} left: the redacted content is still needed to authorise other events"
        )
    if done.busy:
        typer.echo(f"{done.busy:,} busy: locked by a writer, run it again")
    if done.waiting:
        typer.echo(f"{done.waiting:,} waiting: not due yet")


async def _censor(
    dsn: str | None, older_than_ms: int | None, show: Report, *, dry_run: bool
) -> tuple[Censored, Swept]:
    async with maintained(dsn) as database:
        done = await censor(database, older_than_ms=older_than_ms, dry_run=dry_run, report=show)
        return done, Swept() if dry_run else await sweep_if_free(database, report=show)
