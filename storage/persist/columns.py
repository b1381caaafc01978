"""Rows as the parameters of a bulk statement: one array a column."""

from collections.abc import Iterable


def columns(rows: Iterable[Iterable[object]], width: int) -> list[list[object]]:
    """Rows turned into columns, as unnest takes them; ``width`` of them also where there is no row."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


def array(numbers: Iterable[int]) -> str:
    """An array as text: unnest takes no arrays of different lengths apart, so they are cast row by row."""
    return "{" + ",".join(map(str, numbers)) + "}"
