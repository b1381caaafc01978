"""Statements that name their parameters; the numbers are given at import.

    INSERT INTO missing_events (:new_gap.columns)
    SELECT :new_gap.values
    FROM :new_gap.rows AS i

`InputRows` are sent as one array per column. In the text of a statement

    :new_gap.rows         is the rows, `(SELECT unnest($7::text::bigint[]) AS event_nid, …)`
    :new_gap.rows(event_nid, room_nid)  is the rows with these columns alone
    :new_gap.ordered      is the rows, and their numbers from 1 on as the column `ordinal`
    :new_gap.*            is all their parameters, `$7::text::bigint[], $8::text::text[], …`
    :new_gap.event_id     is one of them
    :new_gap.columns      is those that are columns of the table
    :new_gap.values       is the same, read from the alias `i` and cast to the types of the table

An `InputValue` is one parameter, `:received_ts`. Reads declare theirs by name and type in the call,
`compose(…, room_id="text")`. A `ColumnList` has columns and no parameters. The columns of both
kinds of list are also available for an alias:

    :event.of(e)          e.event_nid, e.room_nid, …
    :event.others(e)      the same without the primary key
    :event.update(s)      room_nid = s.room_nid, …, without the primary key
    :event.call(e)        event(e.event_nid, e.room_nid, …), a function of this name

The rows are unnested in a list of SELECT, not in FROM: there each array would take 16 kB for a copy
of its elements, and a statement with a hundred arrays more memory than a session keeps. Rows of
which there are none are not unnested at all (a one-time filter in the plan). Each column takes time
even so. A part that needs a few of them lists these.

`compose` replaces all of these once, at import. `NumberedStatement.bind` makes the argument list by
the same declaration, so nobody keeps a number or an order by hand.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString

import orjson

from storage.database.names import NAMED_NUMBERS
from storage.turns import has_long_list, parts

# --------------------------------------------------------------------------------------------------
# Rows as the parameters of a bulk statement: one array per column.
#
# The driver inspects each element of a list to find its shape. That takes four times as long as
# Postgres needs to read the text of the array. So statements of the hot path take texts,
# `$1::text::bigint[]`.

EMPTY_ARRAY: Final = "{}"


def transposed(rows: Iterable[Iterable[object]], width: int) -> list[list[object]]:
    """Return rows as columns for unnest; without rows, ``width`` empty ones."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


def array_text(values: Sequence[object]) -> str:
    """Return the text of an array of numbers, booleans, texts and None."""
    json = orjson.dumps(values).decode()
    if "\\" in json:  # JSON and Postgres quote alike, but for what they write after a backslash
        json = f"[{','.join(map(_quoted, values))}]"
    return "{" + json[1:-1] + "}"


async def long_lists_as_text(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a statement and its values (``arguments``), each long list as text.

    `SELECT` has Postgres read the text once; a filter would read it for each row. The text is made
    in parts (`storage.turns`). A list whose every use names its type, `$1::text[]`, can be sent so.
    """
    if not has_long_list(arguments):
        return arguments
    sql, *sent = arguments
    for number, values in enumerate(arguments[1:], 1):
        if not has_long_list([values]):
            continue
        typed = re.compile(rf"\${number}::(text|bigint|int)\[\]")
        uses = len(re.findall(rf"\${number}(?!\d)", sql))
        if uses and len(typed.findall(sql)) == uses:
            sql = typed.sub(rf"(SELECT ${number}::text::\1[])::\1[]", sql)
            texts = [array_text(part)[1:-1] async for part in parts(values)]
            sent[number - 1] = f"{{{','.join(texts)}}}"
    return sql, *sent


def _quoted(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return orjson.dumps(value).decode()


def int_array(numbers: Iterable[int]) -> str:
    """Return one array as text.

    unnest cannot take arrays of different lengths apart, so a statement casts them row by row.
    """
    return "{" + ",".join(map(str, numbers)) + "}"


def array_of_int_arrays(rows: Sequence[Sequence[int] | None]) -> str:
    """Return the text of an array of such texts; None stays NULL."""
    if None in rows:
        return array_text([None if row is None else int_array(row) for row in rows])
    return (
        '{"{' + orjson.dumps(rows)[2:-2].decode().replace("],[", '}","{') + '}"}'
        if rows
        else EMPTY_ARRAY
    )


def long_int_array(numbers: Sequence[int]) -> str:
    """Return the same for a long list: faster for thousands of numbers."""
    return "{" + orjson.dumps(numbers)[1:-1].decode() + "}"


def text_array(texts: Collection[str]) -> str:
    if not texts:
        return EMPTY_ARRAY
    joined = '","'.join(texts)
    if "\\" in joined or joined.count('"') != 2 * len(texts) - 2:
        joined = '","'.join(text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return f'{{"{joined}"}}'


ColumnValues = Mapping[str, Sequence[Any]]
"""The values of each column of input rows; empty if there are no rows."""

_PLACEHOLDER: Final = re.compile(
    r"(?<![:\w\]]):([a-z_]+)(?:\.(\*|[a-z_]+)(?:\((\w+(?:,\s*\w+)*)\))?)?"
)
_NUMBER: Final = re.compile(r"\$\d")


@dataclass(frozen=True)
class ColumnList:
    """Some columns of a table; ``key`` are those of them in its primary key."""

    name: str
    columns: tuple[str, ...]
    key: frozenset[str] = frozenset()

    @property
    def unkeyed(self) -> tuple[str, ...]:
        """The columns that are not in the primary key."""
        return tuple(column for column in self.columns if column not in self.key)

    def text(self, member: str, alias: str) -> str | None:
        """Return what stands for a placeholder; None if it means nothing here."""
        match member, bool(alias):
            case "columns", False:
                return ", ".join(self.columns)
            case "of", True:
                return ", ".join(f"{alias}.{column}" for column in self.columns)
            case "call", _:
                return self.call(f"{alias}." if alias else "")
            case "others", True:
                return ", ".join(f"{alias}.{column}" for column in self.unkeyed)
            case "update", True:
                return ", ".join(
                    f"{column} = {self.read(alias, column)}" for column in self.unkeyed
                )
        return None

    def read(self, alias: str, column: str) -> str:
        return f"{alias}.{column}"

    def call(self, prefix: str) -> str:
        """Return the call of the function of this name with these columns."""
        return f"{self.name}({', '.join(prefix + column for column in self.columns)})"


@dataclass(frozen=True)
class SharedCondition(ColumnList):
    """A condition of several statements: `:withheld.of(v)` reads the columns of the alias `v`.

    The ``condition`` has `{row}` for the alias.
    """

    condition: str = ""

    def text(self, member: str, alias: str) -> str | None:
        """Return what stands for a placeholder."""
        return self.condition.replace("{row}", alias) if member == "of" and alias else None


@dataclass(frozen=True)
class LoadedColumns(ColumnList):
    """Columns of a table as a load returns them: some are worked out from several stored ones.

    ``functions`` maps such a column to a function in the schema and the columns that it takes.
    """

    functions: Mapping[str, ColumnList] = field(default_factory=dict)

    def text(self, member: str, alias: str) -> str | None:
        """Return what stands for a placeholder."""
        prefix = f"{alias}." if alias else ""
        if member != ("of" if alias else "columns"):
            return super().text(member, alias)
        return ", ".join(
            f"{function.call(prefix)} AS {column}" if function else prefix + column
            for column, function in ((name, self.functions.get(name)) for name in self.columns)
        )


@dataclass(frozen=True)
class InputRows(ColumnList):
    """Input rows of a statement. ``types``: of all columns, those that the table lacks too.

    ``is_text``: each array is sent as text, which is faster. Switch it off for an array that a
    filter compares with many rows: Postgres would read the text for each row.
    """

    types: Mapping[str, str] = field(default_factory=dict)
    is_text: bool = True

    @classmethod
    def own(cls, name: str, /, **types: str) -> "InputRows":
        """Declare input rows that are of no table."""
        return cls(name, (), types=types)

    def text(self, member: str, alias: str) -> str | None:
        """Return what stands for a placeholder that needs no numbers."""
        match member, bool(alias):
            case "values", False:
                return ", ".join(self.read("i", column) for column in self.columns)
        return super().text(member, alias)

    def read(self, alias: str, column: str) -> str:
        """Return the expression that reads a column of the input rows, in the column's type."""
        kind = self.types[column]
        return f"{alias}.{column}::{kind}" if _is_compound(kind) else f"{alias}.{column}"

    def one_row(self) -> "OneInputRow":
        """Return the same columns as an input of exactly one row."""
        return OneInputRow(self.name, self.columns, self.key, self.types)

    def element(self, parameter: str) -> str:
        """Return the array of a column alone."""
        return parameter

    def subquery(
        self, parameters: Mapping[str, str], columns: Sequence[str], *, is_ordered: bool
    ) -> str:
        names = [*(name for name in parameters if name in self.key), *parameters]
        chosen = {column: parameters[column] for column in columns}
        return _unnested(chosen, parameters[names[0]], is_ordered=is_ordered)

    def parameters(self, first: int) -> dict[str, str]:
        """Return the parameter of each column, numbered from ``first``."""
        return {
            column: f"${number}::{_array_type(kind) if self.is_text else f'{kind}[]'}"
            for number, (column, kind) in enumerate(self.types.items(), first)
        }

    def binder(self) -> Callable[[ColumnValues], list[object]]:
        """Return the function that makes the arguments."""
        encoders = [
            (column, _encoder(kind) if self.is_text else list)
            for column, kind in self.types.items()
        ]
        nothing = [encode(()) for _, encode in encoders]

        def bind(values: ColumnValues) -> list[object]:
            if not values:
                return nothing
            if values.keys() != self.types.keys():
                raise _differs(self.name, values, self.types)
            return [encode(values[column]) for column, encode in encoders]

        return bind


@dataclass(frozen=True)
class OneInputRow(InputRows):
    """An input of exactly one row: each value is a parameter of its own, and no array.

    So one statement is composed twice, for many rows and for one.
    """

    def element(self, parameter: str) -> str:
        """Return a column alone: an array of one."""
        return f"ARRAY[{parameter}]"

    def subquery(
        self, parameters: Mapping[str, str], columns: Sequence[str], *, is_ordered: bool
    ) -> str:
        chosen = [f"{parameters[column]} AS {column}" for column in columns]
        return f"(SELECT {', '.join([*chosen, '1 AS ordinal'] if is_ordered else chosen)})"

    def parameters(self, first: int) -> dict[str, str]:
        """Return the parameter of each column, numbered from ``first``.

        A multirange is a text, which is cast where it is read.
        """
        return {
            column: f"${number}::{'text' if kind.endswith('multirange') else kind}"
            for number, (column, kind) in enumerate(self.types.items(), first)
        }

    def binder(self) -> Callable[[ColumnValues], list[object]]:
        """Return the function that makes the arguments. An empty column is one of NULL.

        It raises ValueError for more than one row, as the others would be lost.
        """
        names = tuple(self.types)

        def bind(values: ColumnValues) -> list[object]:
            if values.keys() != self.types.keys():
                raise _differs(self.name, values, self.types)
            if len(values[names[0]]) > 1:
                raise ValueError(f"{self.name} takes one row")
            return [column[0] if (column := values[name]) else None for name in names]

        return bind


@dataclass(frozen=True)
class InputValue:
    """One parameter of a statement."""

    name: str
    type: str

    def binder(self) -> Callable[[object], list[object]]:
        """Return the function that makes the argument."""
        return lambda value: [value]


@dataclass(frozen=True)
class NumberedStatement:
    """A numbered statement, and its parameters in order."""

    sql: LiteralString
    binders: Mapping[str, Callable[[Any], list[object]]]
    single: frozenset[str] = frozenset()
    """The inputs of exactly one row."""
    has_rows: bool = True
    """False: each argument is a single value."""

    def takes(self, values: Mapping[str, object]) -> bool:
        """Return whether the statement has a place for all rows of these values."""
        for name, columns in values.items():
            rows = max(map(len, columns.values()), default=0) if isinstance(columns, dict) else 1
            if rows != 1 if name in self.single else rows and name not in self.binders:
                return False
        return True

    def bind(self, values: Mapping[str, object]) -> list[object]:
        """Return the arguments.

        ``values``: by name, the `ColumnValues` of input rows and the single values. Raise
        ValueError if a name is missing or surplus, of an input or of a column.
        """
        if values.keys() != self.binders.keys():
            raise _differs("the statement", values, self.binders)
        if not self.has_rows:
            return list(map(values.__getitem__, self.binders))
        arguments: list[object] = []
        for name, bind in self.binders.items():
            arguments += bind(values[name])
        return arguments


class _Numbering:
    """The placeholders of one statement while it is composed."""

    def __init__(self, inputs: Iterable[ColumnList | InputValue]) -> None:
        self.inputs = {item.name: item for item in inputs}
        self.parameters: dict[str, dict[str, str]] = {}
        self.unused = set(self.inputs)
        self._last = 0

    def replace(self, match: re.Match[str]) -> str:
        name, member, alias = match[1], match[2] or "", match[3] or ""
        item = self.inputs.get(name)
        text = None
        if item is not None:
            self.unused.discard(name)
            text = self._rows(item, member, alias) or (
                self._parameter(item, member) if not alias else None
            )
            if text is None and isinstance(item, ColumnList):
                text = item.text(member, alias)
        if text is None:
            raise ValueError(f"no such placeholder: {match[0]}")
        return text

    def _parameter(self, item: ColumnList | InputValue, member: str) -> str | None:
        if isinstance(item, InputValue):
            return None if member else self.number(item)[""]
        if isinstance(item, InputRows) and member == "*":
            return ", ".join(self.number(item).values())
        if isinstance(item, InputRows) and member in item.types:
            return item.element(self.number(item)[member])
        return None

    def _rows(self, item: ColumnList | InputValue, member: str, listed: str) -> str | None:
        if not isinstance(item, InputRows) or member not in {"rows", "ordered"}:
            return None
        columns = re.findall(r"\w+", listed) or list(item.types)
        if unknown := set(columns) - item.types.keys():
            raise ValueError(f"no such placeholder: {item.name} has no {sorted(unknown)}")
        return item.subquery(self.number(item), columns, is_ordered=member == "ordered")

    def number(self, item: InputRows | InputValue) -> dict[str, str]:
        """All parameters of an input stand side by side, where its first placeholder does."""
        if item.name not in self.parameters:
            first = self._last + 1
            self.parameters[item.name] = (
                item.parameters(first)
                if isinstance(item, InputRows)
                else {"": f"${first}::{item.type}"}
            )
            self._last += len(self.parameters[item.name])
        return self.parameters[item.name]


PARAMETER_NAMES: Final[dict[str, tuple[str, ...]]] = {}
"""Of each composed statement by its text, for the reference: `event_id`, or `new_gap.event_id`."""


def compose(
    text: LiteralString, *inputs: ColumnList | InputValue, **values: str
) -> NumberedStatement:
    """Return the statement with its placeholders replaced.

    ``values`` are single parameters by name, with their types. They are numbered first, as they are
    declared, so a call may give them in that order. Raise ValueError for a placeholder that is not
    declared, and for an input, or a column of it, that the text does not use. Raise it also for
    numbered parameters among named ones.
    """
    singles = [InputValue(name, kind) for name, kind in values.items()]
    numbering = _Numbering([*singles, *inputs])
    for single in singles:
        numbering.number(single)
    sql = _PLACEHOLDER.sub(numbering.replace, _with_numbers(text))
    if numbering.unused:
        raise ValueError(f"the statement has no place for {sorted(numbering.unused)}")
    if numbering.parameters and _NUMBER.search(text):
        raise ValueError("the statement has numbers beside names")
    for name, parameters in numbering.parameters.items():
        if lost := [item for item in parameters.values() if item not in sql]:
            raise ValueError(f"the statement has no place for {lost} of {name}")
    binders = {
        name: item.binder()
        for name in numbering.parameters
        if isinstance(item := numbering.inputs[name], InputRows | InputValue)
    }
    PARAMETER_NAMES[sql] = tuple(
        f"{name}.{column}" if column else name
        for name, columns in numbering.parameters.items()
        for column in columns
    )
    lone = frozenset(n for n, item in numbering.inputs.items() if isinstance(item, OneInputRow))
    has_rows = numbering.parameters.keys() != values.keys()
    return NumberedStatement(sql, binders, lone, has_rows)


def by_column(names: Sequence[str], rows: Iterable[Iterable[object]]) -> ColumnValues:
    columns = list(zip(*rows, strict=True))
    return dict(zip(names, columns, strict=True)) if columns else {}


def _unnested(parameters: Mapping[str, str], sample: str, *, is_ordered: bool) -> str:
    """Return a subquery with a column per parameter; ``sample`` is empty if there are no rows."""
    columns = [f"unnest({parameter}) AS {column}" for column, parameter in parameters.items()]
    if is_ordered:
        columns.append(f"generate_subscripts({sample}, 1) AS ordinal")
    sent = "::".join(sample.split("::")[:2])  # the text itself, which need not be read for this
    return f"(SELECT {', '.join(columns)} WHERE {sent} <> '{{}}')"


def _is_compound(kind: str) -> bool:
    return kind.endswith(("[]", "multirange"))


def _array_type(kind: str) -> str:
    if kind == "bytea":
        return "bytea[]"
    # unnest would take an array of arrays apart altogether: each is a text, cast row by row
    return "text::text[]" if _is_compound(kind) else f"text::{kind}[]"


def _encoder(kind: str) -> Callable[[Sequence[Any]], object]:
    if kind == "bytea":
        return list
    return array_of_int_arrays if kind.endswith("[]") else array_text


def _differs(what: str, passed: Mapping[str, Any], declared: Mapping[str, Any]) -> ValueError:
    missing, surplus = declared.keys() - passed.keys(), passed.keys() - declared.keys()
    return ValueError(f"{what} lacks {sorted(missing)}, and does not take {sorted(surplus)}")


# --------------------------------------------------------------------------------------------------
# SQL templates: one text for statements that differ in a few parts, such as the direction.
#
# A template is a module constant with `{name}` placeholders. `fill` puts a part into each of them:
#
#     TEMPLATE_PAGE: Final[LiteralString] = "SELECT event_id FROM events ORDER BY depth {order}"
#     SQL_NEWEST: Final[LiteralString] = fill(TEMPLATE_PAGE, order="DESC")
#
# The fixed numbers of the schema have names: `membership = {JOIN}` (storage/database/names.py).
#
# Call `fill` at module level only, with constants only. Values of a request are parameters of the
# statement (`$1::text`), never parts. `tests/source/test_tidy.py` checks both.

PLACEHOLDER: Final = re.compile(r"\{([a-z][a-z_]*)\}")
NUMBER_NAME: Final = re.compile(r"\{([A-Z][A-Z_]*)\}")


def fill(template: LiteralString, /, **parts: LiteralString) -> LiteralString:
    """Return the template with each `{name}` replaced by the part of that name.

    Blank space around a part is dropped, and its lines are indented as the placeholder's. Other
    braces, such as those of `'{}'`, stay as they are. `{JOIN}` and other names of `NAMED_NUMBERS`
    become `5 /* JOIN */`. Raise ValueError for a placeholder without a part, a part without a
    placeholder, a part that has a placeholder itself, and an unknown name of a number.
    """
    named, provided = set(PLACEHOLDER.findall(template)), set(parts)
    if named != provided:
        raise ValueError(
            f"no part for {sorted(named - provided)}, no use of {sorted(provided - named)}"
        )
    unfilled = [name for name, part in parts.items() if PLACEHOLDER.search(part)]
    if unfilled:
        raise ValueError(f"fill these parts first: {unfilled}")
    lines = [_filled(line, parts) for line in template.split("\n")]
    return _with_numbers("\n".join(line for line in lines if line is not None))


def fill_all(template: LiteralString, parts: Mapping[str, LiteralString]) -> LiteralString:
    """Return the template with the parts that it names; a part may name others of them."""
    names = PLACEHOLDER.findall(template)
    return fill(template, **{name: fill_all(parts[name], parts) for name in names})


def _filled(line: str, parts: Mapping[str, str]) -> str | None:
    """Return a line with its parts; None if it has nothing but empty parts."""
    margin = line[: len(line) - len(line.lstrip())]
    filled = PLACEHOLDER.sub(lambda at: parts[at[1]].strip().replace("\n", f"\n{margin}"), line)
    return None if line.strip() and not filled.strip() else filled


def _with_numbers(text: str) -> str:
    """Return a text with numbers in place of their names."""

    def number(at: re.Match[str]) -> str:
        if at[1] not in NAMED_NUMBERS:
            raise ValueError(f"no such number: {at[0]}")
        return f"{NAMED_NUMBERS[at[1]]} /* {at[1]} */"

    return NUMBER_NAME.sub(number, text)
