"""Rows as the parameters of a bulk statement: one array per column.

The driver inspects each element of a list to find its shape. That takes four times as long as
Postgres needs to read the text of the array. So statements of the hot path take texts,
`$1::text::bigint[]`.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import orjson

from storage.turns import has_long_list, parts

EMPTY_ARRAY: Final = "{}"


def transposed(rows: Iterable[Iterable[object]], width: int) -> list[list[object]]:
    """Return rows as columns for unnest; without rows, ``width`` empty ones."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


def column_texts(rows: Iterable[Iterable[object]], width: int) -> list[str]:
    return [array_text(column) for column in zip(*rows, strict=True)] or [EMPTY_ARRAY] * width


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
    sql, *given = arguments
    for number, values in enumerate(arguments[1:], 1):
        if not has_long_list([values]):
            continue
        typed = re.compile(rf"\${number}::(text|bigint|int)\[\]")
        uses = len(re.findall(rf"\${number}(?!\d)", sql))
        if uses and len(typed.findall(sql)) == uses:
            sql = typed.sub(rf"(SELECT ${number}::text::\1[])::\1[]", sql)
            texts = [array_text(part)[1:-1] async for part in parts(values)]
            given[number - 1] = f"{{{','.join(texts)}}}"
    return sql, *given


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
        joined = '","'.join(one.replace("\\", "\\\\").replace('"', '\\"') for one in texts)
    return f'{{"{joined}"}}'
