"""`room-storage purge`: purge history, whole rooms, or by retention policy; list the jobs."""

from datetime import UTC, datetime
from typing import Annotated, Any, Final, NamedTuple

import typer

from storage.cli.archive import print_swept
from storage.cli.common import (
    DsnOption,
    JsonOption,
    QuietOption,
    ServerNameOption,
    maintained,
    run_on_database,
)
from storage.cli.interrupt import AGAIN, UNCHANGED, run
from storage.cli.output import amount, print_json, print_rows
from storage.database.connection import Database
from storage.errors import InputError
from storage.maintenance.cold_archive import Swept, sweep_if_free
from storage.maintenance.local_server import local_server_name
from storage.maintenance.purge import (
    Purged,
    PurgeJob,
    jobs,
    purge_history,
    purge_retention,
    purge_room,
    resume,
    running,
)
from storage.observability.counters import Report

RoomArgument = Annotated[
    str | None, typer.Argument(metavar="ROOM_ID", help="The room.", show_default=False)
]
BeforeOption = Annotated[
    str | None,
    typer.Option(
        "--before",
        metavar="EVENT_ID",
        help="Purge the events before this one.",
        show_default=False,
    ),
]
BeforeDateOption = Annotated[
    str | None,
    typer.Option(
        "--before-date",
        metavar="DATE",
        help="Purge events received before this date (ISO 8601, UTC).",
        show_default=False,
    ),
]
AllOption = Annotated[
    bool, typer.Option("--all", help="Purge the whole room: it is unknown afterwards.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="With --all: also while local users are joined.")
]
LocalOption = Annotated[
    bool,
    typer.Option("--local", help="Also events of local users, which may exist on no other server."),
]
RetentionOption = Annotated[
    bool, typer.Option("--retention", help="Every room, by its m.room.retention.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Resume every interrupted purge.")]
JobsOption = Annotated[bool, typer.Option("--jobs", help="Show purges and their progress.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only count the events that would be purged.")
]


PHASES: Final = {
    "history": "delete events",
    "deltas": "delete state deltas",
    "groups": "delete state groups",
    "sweep": "delete retained state",
    "room": "delete the room",
}
"""The phases of a job that has not ended, for people."""


class ListedJob(NamedTuple):
    """A job, and its state: done, running, interrupted or failed."""

    job: PurgeJob
    state: str


class PurgeArguments(NamedTuple):
    """The arguments of the command; ``room_id`` None without ``retention``: resume."""

    room_id: str | None
    before: str | None
    before_ts: int | None
    whole: bool
    force: bool
    local: bool
    retention: bool
    dry_run: bool


def command(
    room_id: RoomArgument = None,
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    *,
    before: BeforeOption = None,
    before_date: BeforeDateOption = None,
    whole: AllOption = False,
    force: ForceOption = False,
    local: LocalOption = False,
    retention: RetentionOption = False,
    go_on: ResumeOption = False,
    show_jobs: JobsOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Purge history, in small batches while servers run.

    To resume an interrupted purge, run it again.
    """
    modes = [room_id is not None, retention, go_on, show_jobs]
    if sum(modes) != 1:
        raise InputError("give a room, or one of --retention, --resume and --jobs")
    cuts = sum([before is not None, before_date is not None, whole])
    if room_id is not None and cuts != 1:
        raise InputError("give one of --before, --before-date and --all")
    if room_id is None and (cuts or local):
        raise InputError("--before, --before-date, --all and --local need a room")
    if force and not whole:
        raise InputError("--force needs --all")
    if dry_run and (go_on or show_jobs):
        raise InputError("--dry-run needs a room, or --retention")
    before_ts = None if before_date is None else _milliseconds(before_date)
    if show_jobs:
        _print_jobs(run(_jobs(dsn)), as_json=as_json)
        return
    arguments = PurgeArguments(room_id, before, before_ts, whole, force, local, retention, dry_run)
    purged, swept = run_on_database(
        dsn,
        lambda database, show: _purge(database, server_name, arguments, show),
        UNCHANGED if dry_run else AGAIN,
        quiet=quiet,
    )
    _print_purged(purged, swept, dry_run=dry_run, as_json=as_json)


async def _purge(
    database: Database, server_name: str | None, arguments: PurgeArguments, show: Report
) -> tuple[list[Purged], Swept]:
    """Purge, then remove what was purged from the archive."""
    name = await local_server_name(database, server_name)
    purged = await _purge_tables(database, name, arguments, show)
    return purged, Swept() if arguments.dry_run else await sweep_if_free(database, report=show)


async def _purge_tables(
    database: Database, name: str, arguments: PurgeArguments, show: Report
) -> list[Purged]:
    if arguments.retention:
        purges = purge_retention(database, server_name=name, dry_run=arguments.dry_run, report=show)
        return [purged async for purged in purges]
    if arguments.room_id is None:
        return [purged async for purged in resume(database, server_name=name, report=show)]
    if arguments.whole:
        return [
            await purge_room(
                database,
                arguments.room_id,
                server_name=name,
                force=arguments.force,
                dry_run=arguments.dry_run,
                report=show,
            )
        ]
    return [
        await purge_history(
            database,
            arguments.room_id,
            server_name=name,
            before_event_id=arguments.before,
            before_ts=arguments.before_ts,
            local=arguments.local,
            dry_run=arguments.dry_run,
            report=show,
        )
    ]


async def _jobs(dsn: str | None) -> list[ListedJob]:
    async with maintained(dsn) as database:
        purge_jobs, rooms = await jobs(database), await running(database)
    return [ListedJob(job, _state(job, is_running=job.room_nid in rooms)) for job in purge_jobs]


def _state(job: PurgeJob, *, is_running: bool) -> str:
    if job.finished_ts is not None:
        return "done"
    if is_running:
        return "running"
    return "interrupted" if job.error is None else "failed"


def _milliseconds(date: str) -> int:
    """Parse a date or time of ISO 8601, UTC without an offset."""
    try:
        moment = datetime.fromisoformat(date)
    except ValueError:
        raise InputError(
            f"{date!r} is no date: give one such as 2026-01-31 or 2026-01-31T12:00"
        ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _print_purged(purged: list[Purged], swept: Swept, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        rooms = [_document(purge) for purge in purged]
        print_json({"dry_run": dry_run, "rooms": rooms, "archive": swept._asdict()})
        return
    for purge in purged:
        summary = f"{purge.room_id}: {amount(purge.events, 'event')}"
        job = purge.job
        more = (
            ""
            if job is None
            else (
                f" ({job.deleted_count:,} deleted, {job.set_aside_count:,} made outliers,"
                f" {job.swept_count:,} of them deleted)"
            )
        )
        typer.echo(f"{summary} would be purged" if dry_run else f"{summary} purged{more}")
    if not purged:
        typer.echo("nothing to purge")
    print_swept(swept)


def _document(purged: Purged) -> dict[str, Any]:
    return {
        "room_id": purged.room_id,
        "events": purged.events,
        "job": None if purged.job is None else purged.job._asdict(),
    }


def _print_jobs(listed_jobs: list[ListedJob], *, as_json: bool) -> None:
    if as_json:
        print_json([job._asdict() | {"state": state} for job, state in listed_jobs])
        return
    rows = [
        (
            job.job_id,
            job.room_id,
            f"{job.deleted_count + job.set_aside_count:,}",
            _time(job.started_ts),
            _described(job, state),
        )
        for job, state in listed_jobs
    ]
    print_rows("Purges", ["job", "room", "events", "started (UTC)", "state"], rows, as_json=False)
    if not listed_jobs:
        typer.echo("no purges")


def _described(job: PurgeJob, state: str) -> str:
    """Return the state with the time of the end, or with the phase and why it stopped."""
    if job.finished_ts is not None:
        return f"{state} {_time(job.finished_ts)}"
    text = f"{state}: {PHASES.get(job.phase, job.phase)}"
    return text if job.error is None else f"{text}: {job.error}"


def _time(ts: int) -> str:
    return datetime.fromtimestamp(ts / 1000, UTC).strftime("%Y-%m-%d %H:%M")
