"""Shared by commands: the options of a database, and how it is opened."""

import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import IO, Annotated, Any, Final, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

from storage.cli.interrupt import run
from storage.config import Config
from storage.database.archived_bytes import MAINTENANCE_MS
from storage.database.connection import Database
from storage.database.dsn import (
    IN_PROCESS_LIST,
    SYNAPSE_VARIABLE,
    VARIABLE,
    environment_dsn,
    has_password,
)
from storage.database.embedded import data_directory, embedded_postgres, naming_folder
from storage.database.migrate import check_schema
from storage.errors import InputError, InstanceNameTaken
from storage.observability.counters import Progress, Report
from storage.store.facade import Store
from storage.store.open import open_store

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)


def dsn_of(argument: str | None, context: typer.Context, what: str, variable: str) -> str | None:
    """Return a DSN of the command line, else that of the environment.

    Warn of a password on the command line.
    """
    if argument is None:
        return None if context.resilient_parsing else environment_dsn(variable=variable)
    if has_password(argument):
        logger.warning(IN_PROCESS_LIST, what, variable, variable)
    return argument


def _dsn(context: typer.Context, argument: str | None) -> str | None:
    return dsn_of(argument, context, "--dsn", VARIABLE)


DsnOption = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        callback=_dsn,
        help=(
            "postgresql://…; default: STORAGE_DSN, else the line of the file STORAGE_DSN_FILE,"
            " else the embedded Postgres."
        ),
        show_default=False,
    ),
]
RoomsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--room",
        metavar="ROOM_ID",
        help="Only this room; may be given several times.",
        show_default=False,
    ),
]
ServerNameOption = Annotated[
    str | None,
    typer.Option(
        "--server-name",
        envvar="STORAGE_SERVER_NAME",
        metavar="NAME",
        help=(
            "The homeserver's name: its users are local."
            " Default: the name that the database remembers."
        ),
        show_default=False,
    ),
]


def instance_name_option() -> Any:
    """Return the option `--instance-name`, for a default of the command's own."""
    return typer.Option(
        metavar="NAME",
        envvar="STORAGE_INSTANCE_NAME",
        help="The name of this process; it must be unique.",
    )


JsonOption = Annotated[
    bool, typer.Option("--json", help="JSON for programs instead of a table for people.")
]


def synapse_dsn_of(context: typer.Context, argument: str | None) -> str | None:
    """Return the DSN of a Synapse: as given, else of its variable or file."""
    dsn = dsn_of(argument, context, "SYNAPSE_DSN", SYNAPSE_VARIABLE)
    if dsn is None and not context.resilient_parsing:
        raise InputError(f"give SYNAPSE_DSN, or set {SYNAPSE_VARIABLE} or {SYNAPSE_VARIABLE}_FILE")
    return dsn


@asynccontextmanager
async def database_dsn(dsn: str | None, config: Config) -> AsyncIterator[str]:
    """Yield the given DSN, or that of the embedded Postgres for the duration of the block."""
    if dsn is not None:
        yield dsn
        return
    async with embedded_postgres(config=config) as embedded:
        yield embedded


@asynccontextmanager
async def opened_store(
    dsn: str | None, *, server_name: str | None, instance_name: str
) -> AsyncIterator[Store]:
    """Open a store under the name of `--instance-name`, with the settings of the environment."""
    opening = open_store(
        dsn, server_name=server_name, instance_name=instance_name, config=Config.from_env()
    )
    async with AsyncExitStack() as stack:
        try:
            store = await stack.enter_async_context(opening)
        except InstanceNameTaken as error:
            raise InstanceNameTaken(
                f"another process is at work under the name {instance_name}:"
                " stop it, or choose another name with --instance-name"
            ) from error
        yield store


# --------------------------------------------------------------------------------------------------
# Show progress on standard error: a bar on a terminal, else a line every ten seconds.
#
# Standard output has only the result. `--quiet` shows nothing. The bar disappears at the end.

LINE_SECONDS: Final = 10.0
"""Pause between two lines."""

SPEED_SECONDS: Final = 300.0
"""The remaining time is estimated by the speed of the last five minutes."""

BAR_WIDTH: Final = 20

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]


class ProgressDisplay:
    """Shows the latest `Progress` that it is called with, during a `with` block."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file or sys.stderr
        self._clock = clock
        self._has_lines = not (quiet or self._file.isatty())
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.fields[text]}"),
            console=Console(file=self._file),
            speed_estimate_period=SPEED_SECONDS,
            transient=True,
            disable=quiet or not self._file.isatty(),
            get_time=clock,
        )
        self._phase = ""
        self._task = TaskID(0)
        self._line_at = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Show how far a job is (`storage.observability.counters.Report`)."""
        if not self._phase:
            self._line_at = self._clock() + LINE_SECONDS
        if progress.phase != self._phase:
            self._begin(progress)
        self._bar.update(self._task, completed=progress.done, total=progress.total)
        left = next(task.time_remaining for task in self._bar.tasks if task.id == self._task)
        self._bar.update(self._task, text=amounts(progress, left))
        if self._has_lines and self._clock() >= self._line_at:
            self._line_at = self._clock() + LINE_SECONDS
            self._file.write(f"{progress.phase}: {amounts(progress, left)}\n")
            self._file.flush()

    def _begin(self, progress: Progress) -> None:
        """Begin a phase. Earlier work of an interrupted job does not count as speed."""
        fields: dict[str, Any] = {"completed": progress.done, "total": progress.total, "text": ""}
        if self._phase:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(progress.phase, **fields)
        self._phase = progress.phase


def amounts(progress: Progress, seconds_left: float | None) -> str:
    """Return the amounts in words: "34 %, 1,200 of 3,500 rooms, about 2 min left"."""
    total = progress.total
    if total is None:
        return f"{quantity(progress.done, progress.unit)} {progress.unit}".strip()
    done = min(progress.done, total)
    about = "about " if progress.is_estimate else ""
    unit = "" if progress.unit == "bytes" else f" {progress.unit}"
    parts = [
        f"{int(progress.share * 100)} %" if total else "",
        f"{quantity(done, progress.unit)} of {about}{quantity(total, progress.unit)}{unit}",
        time_left(seconds_left) if seconds_left and done < total else "",
    ]
    return ", ".join(part for part in parts if part)


def quantity(number: float, unit: str) -> str:
    """Return a number for people: with separators, or as 12.3 MB."""
    return decimal(int(number)) if unit == "bytes" else f"{int(number):,}"


def time_left(seconds: float) -> str:
    """Return an estimate in one unit."""
    for size, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.0f} {name} left"
    return "about 1 min left" if seconds >= 45 else "less than a minute left"


# --------------------------------------------------------------------------------------------------
# A database for maintenance: two connections, statements of up to an hour, the current schema.

STATEMENT_TIMEOUT_MS: Final = 3_600_000
INSTANCE_NAME: Final = "command line"
"""No writer has this name, so a running command does not make a writer count as alive."""


@asynccontextmanager
async def maintained(dsn: str | None) -> AsyncIterator[Database]:
    """Open the database of the DSN, or the embedded one. Raise `SchemaOutOfDate`."""
    config = replace(
        Config.from_env(),
        statement_timeout_ms=STATEMENT_TIMEOUT_MS,
        archive_timeout_ms=MAINTENANCE_MS,
        pool_size_max=2,
        instance_name=INSTANCE_NAME,
    )
    naming = naming_folder(config.database_schema) if dsn is None else nullcontext()
    async with (
        database_dsn(dsn, config) as target,
        await Database.open(target, config=config) as database,
    ):
        async with database.connection() as conn:
            with naming:
                await check_schema(conn)
        yield database


def run_on_database(
    dsn: str | None,
    work: Callable[[Database, Report], Awaitable[T]],
    advice: str = "",
    *,
    quiet: bool,
) -> T:
    """Run the work of a command, and show its progress; a signal ends it with the ``advice``."""

    async def opened(show: Report) -> T:
        async with maintained(dsn) as database:
            return await work(database, show)

    with ProgressDisplay(quiet=quiet) as show:
        return run(opened(show), advice)


# --------------------------------------------------------------------------------------------------
# Describe in a few words which database a command works on, without a password.


def described(dsn: str | None, schema: str) -> str:
    """Return the folder of the embedded Postgres, or host, port, database and schema of a DSN."""
    if dsn is None:
        return f"{data_directory().absolute()} (embedded Postgres)"
    parts = urlsplit(dsn)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    host = options.get("host") or parts.netloc.rpartition("@")[2] or "the local socket"
    if "port" in options and not host.endswith(f":{options['port']}"):
        host += f":{options['port']}"
    name = options.get("dbname") or parts.path.lstrip("/") or "that of the user"
    return f"{name} at {host}, schema {schema}"
