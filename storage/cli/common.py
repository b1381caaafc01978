"""Shared by all commands: options, exit codes, output for people or programs, the database."""

import json
import logging
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import IntEnum
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from storage.config import Config
from storage.database.dsn import (
    IN_PROCESS_LIST,
    SYNAPSE_VARIABLE,
    VARIABLE,
    environment_dsn,
    has_password,
)
from storage.database.embedded import embedded_postgres
from storage.errors import InputError, InstanceNameTaken
from storage.store.facade import Store
from storage.store.open import open_store

logger: logging.Logger = logging.getLogger(__name__)


def given_dsn(given: str | None, context: typer.Context, what: str, variable: str) -> str | None:
    """Return a DSN of the command line, else that of the environment.

    Warn of a password on the command line.
    """
    if given is None:
        return None if context.resilient_parsing else environment_dsn(variable=variable)
    if has_password(given):
        logger.warning(IN_PROCESS_LIST, what, variable, variable)
    return given


def _dsn(context: typer.Context, given: str | None) -> str | None:
    return given_dsn(given, context, "--dsn", VARIABLE)


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


def synapse_dsn_of(context: typer.Context, given: str | None) -> str | None:
    """Return the DSN of a Synapse: as given, else of its variable or file."""
    found = given_dsn(given, context, "SYNAPSE_DSN", SYNAPSE_VARIABLE)
    if found is None and not context.resilient_parsing:
        raise InputError(f"give SYNAPSE_DSN, or set {SYNAPSE_VARIABLE} or {SYNAPSE_VARIABLE}_FILE")
    return found


class PlainCommand(TyperCommand):
    """A command whose help shows no type for flags: they take no value."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options and arguments."""
        return without_types(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same for commands with subcommands."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options."""
        return without_types(super().get_params(ctx))


def without_types(params: Any) -> Any:
    """Return the parameters; later versions of typer would show ``<bool>`` beside a flag."""
    for one in params:
        if getattr(one, "is_flag", False) and one.metavar is None:
            one.metavar = ""
    return params


class ExitCode(IntEnum):
    """Exit codes for programs that call us."""

    DONE = 0
    FINDINGS = 1
    """Done, with findings: a rejected line, a broken invariant."""
    USAGE = 2
    """Bad usage or input, or a role or name that does not fit; nothing was done."""
    UNAVAILABLE = 3
    """The database could not be reached or refused."""


MIN_WIDTH: Final = 18
"""The width below which the first column is not folded: names stay whole."""

FILE_WIDTH: Final = 140
"""The width of tables that are not shown on a terminal."""


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


def amount(number: int, noun: str) -> str:
    """Return a number with its noun: "1 event", "2,000 events"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def print_json(value: object) -> None:
    """Print one JSON document, on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False, default=str))


def print_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, as_json: bool
) -> None:
    """Print a table for people, nothing if it is empty; for programs a list of objects."""
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    longest = max(len(str(row[0])) for row in rows)
    for column in columns:
        numeric = all(_is_number(row[columns.index(column)]) for row in rows)
        table.add_column(
            column,
            justify="right" if numeric else "left",
            overflow="fold",
            # rich would shrink the widest column below its least width, and cut the table off
            no_wrap=not table.columns and longest <= MIN_WIDTH,
            min_width=None if table.columns else min(longest, MIN_WIDTH),
        )
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row))
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def _is_number(value: object) -> bool:
    """Return whether a value is a number, or text of one with thousands separators."""
    return isinstance(value, int | float) or (
        isinstance(value, str) and value.replace(",", "").replace(".", "", 1).isdecimal()
    )


def print_values(values: Mapping[str, object], *, as_json: bool) -> None:
    """Print names and values: an object for programs, two columns for people."""
    if as_json:
        print_json(dict(values))
        return
    width = max(map(len, values), default=0)
    for name, value in values.items():
        typer.echo(f"{name:<{width}}  {'' if value is None else value}")
