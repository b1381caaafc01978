"""Row types: a NamedTuple names the columns of a statement. A field may be a row type itself.

    class ReaderEventRow(NamedTuple):
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
    if all(field.nested is None for field in fields_of(row)):
        return row._make  # a public method
    types: dict[str, Any] = {"new": tuple.__new__}
    text = f"lambda columns: {_row_text(row, 0, types)}"
    # as `NamedTuple` makes its constructor: a loop over the fields takes four times as long
    made: Callable[[Any], R] = eval(text, types)  # noqa: S307  # of positions alone
    return made


def _row_text(row: type[NamedTuple], first: int, types: dict[str, Any]) -> str:
    """Return the expression that makes a row of the columns from ``first`` on."""
    name = f"row_{len(types)}"
    types[name] = row
    fields = fields_of(row)
    if all(field.nested is None for field in fields):
        return f"new({name}, columns[{first}:{first + len(fields)}])"
    values = []
    for field in fields:
        at = first + field.columns.start
        if field.nested is None:
            values.append(f"columns[{at}]")
            continue
        inner = _row_text(field.nested, at, types)
        is_optional = type(None) in get_args(field.hint)
        values.append(f"None if columns[{at}] is None else {inner}" if is_optional else inner)
    return f"new({name}, ({', '.join(values)},))"
