"""`room-storage jobs`: run or list the background jobs of migrations."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from storage.cli.common import DsnOption, JsonOption, print_json, print_rows
from storage.cli.interrupt import AGAIN, run
from storage.cli.maintaining import maintained
from storage.cli.progress import ProgressDisplay, QuietOption
from storage.database.background import JobRow, jobs, run_jobs
from storage.database.migrate import script_directory
from storage.observability.progress import Progress, Report

if TYPE_CHECKING:
    from storage.database.migration_steps import Job


def command(
    dsn: DsnOption = None,
    *,
    listed: Annotated[
        bool, typer.Option("--list", help="List the progress of each; do nothing.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the long data steps that migrations have deferred, in small batches while servers run.

    Run it again after an interruption.
    """
    with ProgressDisplay(quiet=quiet) as show:
        rows = run(_jobs(dsn, show, work=not listed), "" if listed else AGAIN)
    if as_json:
        print_json([row._asdict() | {"state": row.state} for row in rows])
        return
    shown = [
        (row.name, row.revision, row.state, row.rows_done, row.rows_expected, row.error)
        for row in rows
    ]
    print_rows(
        "Jobs", ["job", "revision", "state", "rows done", "of about", "error"], shown, as_json=False
    )
    if not rows:
        typer.echo("no jobs")


async def _jobs(dsn: str | None, show: Report, *, work: bool) -> list[JobRow]:
    async with maintained(dsn) as database:
        if work:
            async with aclosing(run_jobs(database, _known())) as progress:
                await _to_the_end(progress, show)
        async with database.connection() as conn:
            return await jobs(conn)


async def _to_the_end(progress: AsyncIterator[JobRow], show: Report) -> None:
    async for row in progress:
        show(Progress(row.name, row.rows_done, row.rows_expected, "rows", is_estimate=True))


def _known() -> "dict[str, Job]":
    from storage.database.migration_steps import jobs_of  # noqa: PLC0415  # alembic is slow to import

    return {job.name: job for job in jobs_of(script_directory())}
