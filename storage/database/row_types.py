"""Row types: a NamedTuple names the columns of a statement. A field may be a row type itself.

    class RootRow(NamedTuple):
        withheld: bool
        event: StoredEventRow            # its 14 columns follow each other in the statement

    class PageRow(NamedTuple):
        moves: int
        event: StoredEventRow | None     # None where the first of its columns is NULL

So the columns of an event are declared once, for all statements that return events.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args

from storage.codec import StoredBytes

R = TypeVar("R", bound=NamedTuple)
"""The row type of a statement: its fields are the columns, in order."""


class RowField(NamedTuple):
    """A field of a row type: its annotation, and its columns in the statement.

    ``nested``: its row type. None: it is one column.
    """

    name: str
    hint: Any
    nested: type[NamedTuple] | None
    columns: slice


@cache
def fields_of(row: type[NamedTuple]) -> tuple[RowField, ...]:
    """Return the fields of a row type."""
    fields: list[RowField] = []
    at = 0
    for name in row._fields:
        hint = row.__annotations__[name]
        nested = next((kind for kind in (hint, *get_args(hint)) if hasattr(kind, "_fields")), None)
        width = 1 if nested is None else fields_of(nested)[-1].columns.stop
        fields.append(RowField(name, hint, nested, slice(at, at + width)))
        at += width
    return tuple(fields)


def columns_of(row: type[NamedTuple]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the annotation of each column, those of nested row types, too."""
    for field in fields_of(row):
        if field.nested is None:
            yield field.name, field.hint
        else:
            yield from columns_of(field.nested)


def span(row: type[NamedTuple], name: str) -> slice:
    """Return the columns of a field: for the rows of `Connection.records`."""
    return next(field.columns for field in fields_of(row) if field.name == name)


@cache
def stored_fields(row: type[NamedTuple]) -> tuple[int, ...]:
    """Return the positions of the columns of a row type that are stored bytes of events."""
    return tuple(
        at
        for at, (_, hint) in enumerate(columns_of(row))
        if hint is StoredBytes or StoredBytes in get_args(hint)
    )


@cache
def maker(row: type[R]) -> Callable[[Any], R]:
    """Return the function that makes a row of its columns."""
    steps = [
        (
            slice(field.columns.start),
            field.columns,
            slice(field.columns.stop, None),
            maker(field.nested),
            type(None) in get_args(field.hint),
        )
        for field in reversed(fields_of(row))
        if field.nested is not None
    ]
    if not steps:
        return row._make  # a public method

    def make(columns: Any) -> R:
        for before, own, after, nested, is_optional in steps:  # the last one first
            inner = columns[own]
            made = None if is_optional and inner[0] is None else nested(inner)
            columns = columns[before] + (made,) + columns[after]  # half the time
        return row._make(columns)

    return make
