"""`room-storage censor`: remove redacted content from disk."""

from typing import Annotated, Final

import typer

from storage.cli.archive import DAYS_MAX, print_swept
from storage.cli.common import DsnOption, JsonOption, QuietOption, run_on_database
from storage.cli.interrupt import AGAIN, UNCHANGED
from storage.cli.output import amount, print_json
from storage.database.connection import Database
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

    async def work(database: Database, show: Report) -> tuple[Censored, Swept]:
        done = await censor(database, older_than_ms=age_ms, dry_run=dry_run, report=show)
        return done, Swept() if dry_run else await sweep_if_free(database, report=show)

    done, swept = run_on_database(dsn, work, UNCHANGED if dry_run else AGAIN, quiet=quiet)
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
