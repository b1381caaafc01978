"""Compare an index of block ranges (BRIN) with its table.

Such an index has no entries of rows. It has the first and the last key of each range of blocks. A
search reads the ranges that may have its key, and those without a summary yet. So it returns no row
that does not match, but it misses the rows of a range whose summary is too narrow. Therefore the
rows of a period that a search finds are counted, and compared with a scan of the table.

The periods follow from the first and last keys of the ranges, by the table. Each of these keys is a
period of its own, because a summary that lacks it may have all other keys of its range:

  rows of range 1: 10 to 40    of range 2: 30 to 70
  periods: 10    11 to 29    30    31 to 39    40    41 to 69    70

In a table that was filled in the order of its keys, this finds each summary that lacks a row. The
ranges of an import may all have the same period, so each search reads the whole table. Then there
are fewer, longer periods, and a summary that lacks only a part of a period is not found.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection

READS_MAX: Final = 8
"""All searches together read at most so many times as many blocks as the table has."""

KEYS_MAX: Final = 2_048
"""Each key makes two periods, each is a search, and each search reads the whole index."""

TOGETHER: Final = 256
"""Searches of one statement."""

LOWEST: Final = -(2**63)
HIGHEST: Final = 2**63 - 1

THROUGH_BLOCK_RANGES: Final[LiteralString] = """
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = on;
SET LOCAL enable_tidscan = off;
SET LOCAL enable_indexscan = off;
SET LOCAL enable_indexonlyscan = off;
SET LOCAL max_parallel_workers_per_gather = 0;
SET LOCAL cpu_operator_cost TO DEFAULT;
SET LOCAL cpu_index_tuple_cost = 1000000
"""
"""The index of block ranges is the cheapest path: an entry of any other index is expensive."""

SQL_BLOCK_RANGE_INDEXES: Final[LiteralString] = """
SELECT c.relname::text AS name, t.relname::text AS table_name,
    (pg_relation_size(t.oid) / current_setting('block_size')::int)::int AS table_pages,
    i.indnatts = 1 AND a.atttypid = 'bigint'::regtype AND o.opcmethod = c.relam
        AND o.opcname = 'int8_minmax_ops' AS is_comparable,
    range.pages AS range_pages,
    key.text AS key,
    format('SELECT min(%1$s) AS first, max(%1$s) AS last FROM %2$s WHERE %3$s AND %1$s IS NOT NULL '
        'GROUP BY (ctid::text::point)[0]::bigint / %4$s', key.text, i.indrelid::regclass,
        predicate.text, range.pages) AS of_ranges,
    format('SELECT width_bucket(%1$s, $1::bigint[]) AS keys, '
        'COALESCE(%1$s = ($1::bigint[])[width_bucket(%1$s, $1::bigint[])], false) AS is_key, '
        'count(*) AS rows FROM %2$s WHERE %3$s AND %1$s IS NOT NULL GROUP BY 1, 2', key.text,
        i.indrelid::regclass, predicate.text) AS of_table,
    format('SELECT f.rows FROM unnest($1::bigint[], $2::bigint[]) '
        'WITH ORDINALITY AS p (first, last, number) CROSS JOIN LATERAL (SELECT count(*) AS rows '
        'FROM %2$s WHERE %3$s AND %1$s >= p.first AND %1$s <= p.last OFFSET 0) AS f '
        'ORDER BY p.number', key.text, i.indrelid::regclass, predicate.text) AS of_periods
FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid
JOIN pg_class t ON t.oid = i.indrelid
JOIN pg_am m ON m.oid = c.relam AND m.amname = 'brin'
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = 1
JOIN pg_opclass o ON o.oid = i.indclass[0]
CROSS JOIN LATERAL (SELECT pg_get_indexdef(c.oid, 1, true) AS text) AS key
CROSS JOIN LATERAL (
    SELECT COALESCE(pg_get_expr(i.indpred, i.indrelid), 'true') AS text
) AS predicate
CROSS JOIN LATERAL (
    SELECT COALESCE(max(option_value::int) FILTER (WHERE option_name = 'pages_per_range'), 128)
        AS pages
    FROM pg_options_to_table(c.reloptions)
) AS range
WHERE t.relnamespace = quote_ident(current_schema())::regnamespace
    AND i.indisvalid  -- as in catalogue.py
    AND ($1::text[] IS NULL OR t.relname = ANY($1::text[]))
    AND has_table_privilege(t.oid, 'SELECT')
ORDER BY t.relname, c.relname
"""


class BlockRangesRow(NamedTuple):
    """An index of block ranges.

    ``is_comparable``: whether its key is one bigint. ``range_pages``: the pages of a range.

    Statements: ``of_ranges`` returns the first and last key of each range. ``of_table`` has the
    rows of each period between these keys, and ``of_periods`` those that the index finds.
    """

    name: str
    table_name: str
    table_pages: int
    is_comparable: bool
    range_pages: int
    key: str
    of_ranges: str
    of_table: str
    of_periods: str


class Keys(NamedTuple):
    """The first and the last key of a range of blocks."""

    first: int
    last: int


class PeriodRow(NamedTuple):
    """The rows of a period: after so many of the keys, or, if ``is_key``, at the last of them."""

    keys: int
    is_key: bool
    rows: int


class Period(NamedTuple):
    """Keys from ``first`` to ``last``, both included, and the rows that have them."""

    first: int
    last: int
    rows: int


async def block_range_indexes(
    conn: Connection, tables: Collection[str] | None = None
) -> list[BlockRangesRow]:
    names = None if tables is None else list(tables)
    return await conn.fetch(SQL_BLOCK_RANGE_INDEXES, names, row=BlockRangesRow)


async def missed_rows(conn: Connection, index: BlockRangesRow, through_table: str) -> str | None:
    """Return how the index differs from its table, or None.

    ``through_table``: the settings with which Postgres reads a table without an index. It changes
    settings of the transaction, which has one snapshot.
    """
    if not index.is_comparable:
        return "not compared: its key is not one number of 64 bits"
    await conn.execute(through_table)
    ranges = await conn.fetch(index.of_ranges, row=Keys)
    if not ranges:
        return None
    await conn.execute(THROUGH_BLOCK_RANGES)
    always = await _always_read(conn, index, max(ranges, key=lambda keys: keys.last).last)
    if always is None:
        return "not compared: Postgres does not search by it"
    keys = keys_of(ranges, always / index.range_pages)
    await conn.execute(through_table)
    periods = periods_of(keys, await conn.fetch(index.of_table, keys, row=PeriodRow))
    await conn.execute(THROUGH_BLOCK_RANGES)
    return difference(index.key, periods, await _search_counts(conn, index, periods))


def difference(key: str, periods: Sequence[Period], counts: Sequence[int]) -> str | None:
    """Return which rows a search misses, in words, or None if it finds all."""
    short = [period for period, rows in zip(periods, counts, strict=True) if rows != period.rows]
    if not short:
        return None
    rows = sum(period.rows for period in periods)
    return (
        f"{sum(counts)} of {rows} rows are found by {key}: some from {short[0].first} to"
        f" {short[0].last} are missed"
    )


def keys_of(ranges: Sequence[Keys], always_read: float) -> list[int]:
    """Return the keys that bound the periods, in order.

    They are first and last keys of ranges: all of them, or every second, fourth, … with the last of
    all, until the searches of all periods keep to the limits. ``always_read``: the ranges that each
    search reads.
    """
    keys = sorted({key for pair in ranges for key in pair})
    while keys and (
        len(keys) > KEYS_MAX
        or ranges_read(ranges, keys) + (2 * len(keys) + 1) * always_read > READS_MAX * len(ranges)
    ):
        keys = keys[::-2][::-1] if len(keys) > 1 else []
    return keys


def ranges_read(ranges: Sequence[Keys], keys: Sequence[int]) -> int:
    """Return how many ranges the searches of all periods read, each as often as it is read."""
    return sum(
        _number(keys, block_range.last) - _number(keys, block_range.first) + 1
        for block_range in ranges
    )


def _number(keys: Sequence[int], key: int) -> int:
    """Return the number of a key's period: 0 before all, 1 at the first key, 2 after it."""
    return bisect_left(keys, key) + bisect_right(keys, key)


def periods_of(keys: Sequence[int], rows: Sequence[PeriodRow]) -> list[Period]:
    counts: Mapping[int, int] = {2 * row.keys - row.is_key: row.rows for row in rows}
    bounds = enumerate(_bounds(keys))
    return [Period(*end, counts[number]) for number, end in bounds if number in counts]


def _bounds(keys: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last key of each period, also of those that can have no row."""
    for before, key in pairwise([LOWEST - 1, *keys]):
        yield before + 1, key - 1
        yield key, key
    yield (keys[-1] + 1 if keys else LOWEST), HIGHEST


async def _always_read(conn: Connection, index: BlockRangesRow, last: int) -> int | None:
    """Return how many pages a search for a key after the last reads: those without a summary.

    Return None if Postgres does not use the index.
    """
    beyond = min(last + 1, HIGHEST)
    sql = f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {index.of_periods}"
    [text] = json.loads(await conn.fetchval(sql, [beyond], [HIGHEST]))
    scans = [node for node in _nodes(text["Plan"]) if "Scan" in node["Node Type"]]
    kinds = {(node["Node Type"], node.get("Index Name")) for node in scans}
    if kinds != {
        ("Function Scan", None),
        ("Bitmap Heap Scan", None),
        ("Bitmap Index Scan", index.name),
    }:
        return None
    pages: list[int] = [node.get("Lossy Heap Blocks", 0) for node in scans]
    return sum(pages)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", []):
        yield from _nodes(below)


async def _search_counts(
    conn: Connection, index: BlockRangesRow, periods: Sequence[Period]
) -> list[int]:
    """Return how many rows of each period a search by the index finds."""
    counts: list[int] = []
    for at in range(0, len(periods), TOGETHER):
        part = periods[at : at + TOGETHER]
        bounds = [period.first for period in part], [period.last for period in part]
        counts += await conn.fetchvals(index.of_periods, *bounds)
    return counts
