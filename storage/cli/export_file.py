"""`room-storage export`: rooms into an NDJSON file that `room-storage import` reads."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Final, NamedTuple

import typer

from storage.cli.common import DsnOption, JsonOption, ProgressDisplay, QuietOption, maintained
from storage.cli.interrupt import run
from storage.cli.output import print_values
from storage.errors import InputError
from storage.ids import RoomId
from storage.importing.reading import STANDARD_INPUT
from storage.maintenance.archive import archive, rooms_to_archive
from storage.maintenance.totals import event_total
from storage.observability.counters import Counted, Report

STANDARD_OUTPUT: Final = STANDARD_INPUT

NO_FILE: Final = "no file was written"
PARTIAL: Final = "the export is not complete"


class Done(NamedTuple):
    """The result of an export."""

    rooms: int
    events: int
    bytes: int
    seconds: float


def command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A new NDJSON file; - for standard output.", show_default=False
        ),
    ],
    *,
    dsn: DsnOption = None,
    room: Annotated[
        list[str] | None,
        typer.Option(
            "--room",
            metavar="ROOM_ID",
            help="Only this room; may be given several times.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it exists.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write events as received, with the fields that `import` needs to restore them.

    It exports a snapshot. A file is written whole, or not at all. Without --room, a room whose
    members are not all known yet is skipped, and named. For partitioned Parquet, and for
    events since an earlier export, use `room-storage spark export`.
    """
    if file.endswith(".parquet"):
        raise InputError(
            f"{file}: this command writes NDJSON; `room-storage spark export` writes Parquet"
        )
    with _opened(file, overwrite=overwrite) as target, ProgressDisplay(quiet=quiet) as show:
        rooms = None if room is None else [RoomId(room_id) for room_id in room]
        done = run(
            _export(target, dsn, rooms, show), PARTIAL if file == STANDARD_OUTPUT else NO_FILE
        )
    if file != STANDARD_OUTPUT:
        print_values(done._asdict(), as_json=as_json)


async def _export(
    target: IO[bytes], dsn: str | None, room_ids: list[RoomId] | None, show: Report
) -> Done:
    started, events, size, skipped = time.monotonic(), 0, 0, 0
    async with (
        maintained(dsn) as database,
        database.transaction(isolation="repeatable_read", readonly=True) as conn,
    ):
        rooms = await rooms_to_archive(conn, room_ids)
        total = await event_total(conn, room_ids)
        counted = Counted(show, "export", total.rows, "events", total.is_estimate)
        for room in rooms:
            if room.is_partial:
                skipped += 1
                typer.echo(
                    f"{room.room_id} is skipped: its members are not all known yet", err=True
                )
                continue
            async for lines in archive(conn, room):
                counted.add(len(lines))
                target.write(b"\n".join([*lines, b""]))
                events, size = events + len(lines), size + sum(map(len, lines)) + len(lines)
    return Done(len(rooms) - skipped, events, size, round(time.monotonic() - started, 3))


@contextmanager
def _opened(file: str, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """Open the file to write to.

    It gets its name once it is whole. Raise `InputError` if it cannot be written; then there is no
    file. An existing file is replaced only with ``overwrite``.
    """
    if file == STANDARD_OUTPUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(file)
    if path.is_file() and not overwrite:
        raise InputError(f"{file} exists: choose another name, or replace it with --overwrite")
    # a device or a pipe is written directly
    part = path if path.exists() and not path.is_file() else path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as target:
            yield target
        if part != path:
            part.replace(path)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    finally:
        if part != path:
            part.unlink(missing_ok=True)
