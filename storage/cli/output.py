"""The output of commands: help, exit codes, tables for people and JSON for programs.

`app` needs this module before it knows the command, so it imports little.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command whose help shows no type for flags: they take no value."""

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same for commands with subcommands."""

    def get_params(self, ctx: Any) -> Any:
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
    from rich.console import Console  # noqa: PLC0415  # as long as all other imports
    from rich.table import Table  # noqa: PLC0415

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
