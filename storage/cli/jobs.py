"""`room-storage jobs`: run or list the background jobs of migrations."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

import typer

from storage.cli.common import DsnOption, JsonOption, QuietOption, run_on_database
from storage.cli.interrupt import AGAIN
from storage.cli.output import print_json, print_rows
from storage.database.background import JobRow, jobs, register_again, run_jobs
from storage.database.connection import Database
from storage.database.migrate import HEAD_REVISION
from storage.maintenance.known_jobs import known_jobs
from storage.maintenance.reencode import JOB_NAME
from storage.observability.counters import Progress, Report


def command(
    dsn: DsnOption = None,
    *,
    listed: Annotated[
        bool, typer.Option("--list", help="List the progress of each; do nothing.")
    ] = False,
    re_encode: Annotated[
        bool,
        typer.Option(
            "--re-encode", help="Also encode all events again, as after train-dictionary."
        ),
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the long data steps that migrations have deferred, in small batches while servers run.

    Run it again after an interruption.
    """
    rows = run_on_database(
        dsn,
        lambda database, show: _jobs(database, show, work=not listed, re_encode=re_encode),
        "" if listed else AGAIN,
        quiet=quiet,
    )
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


async def _jobs(database: Database, show: Report, *, work: bool, re_encode: bool) -> list[JobRow]:
    if work and re_encode:
        async with database.transaction() as conn:
            await register_again(conn, JOB_NAME, HEAD_REVISION)
    if work:
        async with aclosing(run_jobs(database, known_jobs())) as progress:
            await _to_the_end(progress, show)
    async with database.connection() as conn:
        return await jobs(conn)


async def _to_the_end(progress: AsyncIterator[JobRow], show: Report) -> None:
    async for row in progress:
        show(Progress(row.name, row.rows_done, row.rows_expected, "rows", is_estimate=True))
