"""`room-storage archive`: move bytes of old events out of the database, or back."""

from dataclasses import asdict
from typing import Annotated, Any, Final, NamedTuple

import typer

from storage.cli.common import DsnOption, JsonOption, QuietOption, RoomsOption, run_on_database
from storage.cli.interrupt import AGAIN, UNCHANGED
from storage.cli.output import amount, print_json
from storage.database.connection import Database
from storage.errors import InputError
from storage.maintenance.cold_archive import (
    Archived,
    Returned,
    Swept,
    archive_events,
    return_events,
    sweep,
)
from storage.observability.counters import Report

DAY_MS: Final = 86_400_000
DAYS_MAX: Final = 1_000_000

OlderOption = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="DAYS",
        help="Archive events received at least this many days ago.",
        show_default=False,
    ),
]
ToOption = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="URL",
        envvar="STORAGE_ARCHIVE_URL",
        help="The folder for packs: a path, file:///…, or a URL that fsspec knows.",
        show_default=False,
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Archive at most this many events.", show_default=False),
]
BackOption = Annotated[bool, typer.Option("--back", help="Return events to the database.")]
PackOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --back: only those of this pack.", show_default=False),
]
SweepOption = Annotated[
    bool, typer.Option("--sweep", help="Only remove what nothing refers to any more.")
]
TakeOverOption = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Own all folders: this database has replaced their owner. Alone, it sweeps.",
    ),
]


class ArchiveArguments(NamedTuple):
    """The arguments of the command; ``older_than_ms`` None: return events, or sweep."""

    older_than_ms: int | None
    url: str
    room_ids: list[str] | None
    limit: int | None
    is_back: bool
    pack: int | None
    dry_run: bool
    take_over: bool


def command(
    dsn: DsnOption = None,
    *,
    older_than: OlderOption = None,
    to: ToOption = "",
    rooms: RoomsOption = None,
    limit: LimitOption = None,
    back: BackOption = False,
    pack: PackOption = None,
    only_sweep: SweepOption = False,
    take_over: TakeOverOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move the bytes of old events into files, where all reads still find them.

    Works in small batches while servers run. To continue an interrupted run, run it again.
    """
    only_sweep = only_sweep or (take_over and older_than is None and not back)
    if sum([older_than is not None, back, only_sweep]) != 1:
        raise InputError("give one of --older-than, --back and --sweep")
    if take_over and dry_run:
        raise InputError("--take-over changes the folders: leave --dry-run out")
    if pack is not None and not back:
        raise InputError("--pack needs --back")
    if limit is not None and older_than is None:
        raise InputError("--limit needs --older-than")
    if rooms and only_sweep:
        raise InputError("--room needs --older-than or --back")
    if dry_run and older_than is None:
        raise InputError("--dry-run needs --older-than")
    age_ms = None if older_than is None else _milliseconds(older_than)
    arguments = ArchiveArguments(age_ms, to, rooms or None, limit, back, pack, dry_run, take_over)
    done = run_on_database(
        dsn,
        lambda database, show: _work(database, arguments, show),
        UNCHANGED if dry_run else AGAIN,
        quiet=quiet,
    )
    if as_json:
        print_json({"dry_run": dry_run} | _document(done))
    else:
        _print(done, arguments)


def print_swept(swept: Swept) -> None:
    """Print the result of a sweep, unless nothing was to do."""
    if swept.removed or swept.packs:
        typer.echo(f"{amount(swept.removed, 'event')} removed from the archive")
    if swept.waiting:
        typer.echo(
            f"{swept.waiting:,} wait in the archive: a transaction may still read them, or their"
            " pack cannot be changed now; run `room-storage archive --sweep` later"
        )


def _milliseconds(days: str) -> int:
    """Parse a number of days, with or without the letter d."""
    try:
        number = float(days.removesuffix("d"))
    except ValueError:
        number = -1.0
    if not 0 <= number <= DAYS_MAX:
        raise InputError(f"{days!r} is no number of days: give one such as 90")
    return round(number * DAY_MS)


def _document(done: Archived | Returned | Swept) -> dict[str, Any]:
    return done._asdict() if isinstance(done, Swept) else asdict(done)


def _print(done: Archived | Returned | Swept, arguments: ArchiveArguments) -> None:
    if isinstance(done, Archived):
        _print_archived(done, dry_run=arguments.dry_run)
    elif isinstance(done, Returned):
        _print_returned(done)
    else:
        print_swept(done)
    if arguments.take_over:
        typer.echo("the folders of the archive belong to this database now")


def _print_archived(done: Archived, *, dry_run: bool) -> None:
    size = f"{amount(done.events, 'event')}, {amount(done.bytes, 'byte')}"
    if dry_run:
        typer.echo(f"{size} to be archived")
        return
    typer.echo(f"{size} archived in {amount(done.packs, 'pack')}")
    if done.left:
        typer.echo(f"{done.left:,} left: changed or locked meanwhile, run it again")
    if done.events:
        typer.echo("VACUUM returns the space to Postgres, pg_repack or VACUUM FULL to the disk")


def _print_returned(done: Returned) -> None:
    typer.echo(
        f"{amount(done.events, 'event')} returned, {amount(done.packs, 'empty pack')} removed"
    )
    if done.lost:
        typer.echo(f"{done.lost:,} lost: their packs are missing or damaged, run verify")


async def _work(
    database: Database, arguments: ArchiveArguments, show: Report
) -> Archived | Returned | Swept:
    if arguments.older_than_ms is not None:
        return await archive_events(
            database,
            older_than_ms=arguments.older_than_ms,
            url=arguments.url,
            room_ids=arguments.room_ids,
            limit=arguments.limit,
            dry_run=arguments.dry_run,
            take_over=arguments.take_over,
            report=show,
        )
    if arguments.is_back:
        return await return_events(
            database,
            pack=arguments.pack,
            room_ids=arguments.room_ids,
            take_over=arguments.take_over,
            report=show,
        )
    return await sweep(database, take_over=arguments.take_over, report=show)
