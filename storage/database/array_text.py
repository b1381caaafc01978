"""Rows as the parameters of a bulk statement: one array a column.

The driver looks at each element of a list to find out its shape, which takes four times as long as
Postgres takes to read the text of the array: so statements of the hot path take texts,
`$1::text::bigint[]`.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import orjson

EMPTY_ARRAY: Final = "{}"


def transposed(rows: Iterable[Iterable[object]], width: int) -> list[list[object]]:
    """Rows turned into columns, as unnest takes them; ``width`` of them also where there is no row."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


def column_texts(rows: Iterable[Iterable[object]], width: int) -> list[str]:
    """The same, each column as text."""
    return [array_text(column) for column in zip(*rows, strict=True)] or [EMPTY_ARRAY] * width


def array_text(values: Sequence[object]) -> str:
    """Numbers, booleans, texts and None as the text of an array."""
    json = orjson.dumps(values).decode()
    if "\\" in json:  # JSON and Postgres quote alike, but for what they write after a backslash
        json = f"[{','.join(map(_quoted, values))}]"
    return "{" + json[1:-1] + "}"


def _quoted(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return orjson.dumps(value).decode()


def int_array(numbers: Iterable[int]) -> str:
    """An array as text: unnest takes no arrays of different lengths apart, so they are cast row by row."""
    return "{" + ",".join(map(str, numbers)) + "}"


def array_of_int_arrays(rows: Sequence[Sequence[int]]) -> str:
    """The text of an array of such texts."""
    return (
        '{"{' + orjson.dumps(rows)[2:-2].decode().replace("],[", '}","{') + '}"}'
        if rows
        else EMPTY_ARRAY
    )


def long_int_array(numbers: Sequence[int]) -> str:
    """The same for a list of many: faster for thousands, and of lists alone."""
    return "{" + orjson.dumps(numbers)[1:-1].decode() + "}"


def text_array(texts: Collection[str]) -> str:
    """Texts as the text of an array, whatever they hold."""
    if not texts:
        return EMPTY_ARRAY
    joined = '","'.join(texts)
    if "\\" in joined or joined.count('"') != 2 * len(texts) - 2:
        joined = '","'.join(one.replace("\\", "\\\\").replace('"', '\\"') for one in texts)
    return f'{{"{joined}"}}'
