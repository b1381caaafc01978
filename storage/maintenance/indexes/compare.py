"""Read indexes and tables, and compare them."""

import json
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from itertools import groupby
from operator import add
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import StorageCorrupt
from storage.maintenance.indexes.block_ranges import block_range_indexes, missed_rows
from storage.maintenance.indexes.catalogue import IndexRow, indexes
from storage.observability.counters import Counted, Report, silent

THROUGH_INDEX: Final[LiteralString] = """
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = off;
SET LOCAL enable_tidscan = off;
SET LOCAL enable_sort = off;
SET LOCAL enable_incremental_sort = off;
SET LOCAL enable_indexscan = on;
SET LOCAL enable_indexonlyscan = on;
SET LOCAL max_parallel_workers_per_gather = 0;
SET LOCAL cpu_operator_cost = 1
"""
"""The index is the only path left.

Operators are expensive, so that Postgres reads no other index whose rows it would have to filter by
the predicate.
"""

THROUGH_TABLE: Final[LiteralString] = """
SET LOCAL enable_seqscan = on;
SET LOCAL enable_bitmapscan = off;
SET LOCAL enable_tidscan = off;
SET LOCAL enable_indexscan = off;
SET LOCAL enable_indexonlyscan = off;
SET LOCAL cpu_operator_cost TO DEFAULT
"""
"""A sequential scan is the only path left."""

PAGES_TOGETHER: Final = 1_000
"""Indexes of tables with fewer pages share one statement."""


class IndexMismatch(NamedTuple):
    """An index that differs from its table; ``found`` describes how, with numbers of entries."""

    name: str
    table_name: str
    found: str


class Entries(NamedTuple):
    """The entries read through an index.

    ``checksum``: the sum of their hashes, None for none. ``disordered``: how many come before a
    smaller one.
    """

    size: Decimal
    checksum: Decimal | None
    disordered: Decimal


class Rows(NamedTuple):
    """The rows of a table that belong in an index.

    ``of_keys``: the sum of the hashes of their keys. ``of_rows``: the same with the `ctid` of each
    row.
    """

    size: Decimal
    of_keys: Decimal | None
    of_rows: Decimal | None


async def index_mismatches(
    database: Database, tables: Collection[str] | None = None, *, report: Report = silent
) -> list[IndexMismatch]:
    """Return the corrupt indexes, of these tables or of all in the schema.

    It only reads, in one snapshot; writers may go on. Raise `DatabaseUnavailable` where one index,
    or table, takes longer than `Config.statement_timeout_ms`.
    """
    async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
        return await mismatches_in_snapshot(conn, tables, report=report)


async def mismatches_in_snapshot(
    conn: Connection, tables: Collection[str] | None = None, *, report: Report = silent
) -> list[IndexMismatch]:
    """Do the same in the caller's transaction; statements after it get bad plans."""
    index_rows = await indexes(conn, tables)
    of_block_ranges = await block_range_indexes(conn, tables)
    pages = _pages(index_rows) + sum(map(_table_pages, _tables(index_rows)))
    pages += sum(index.table_pages for index in of_block_ranges)
    counted = Counted(report, "compare indexes", pages, "pages", is_estimate=True)
    entries = await _all_entries(conn, index_rows, counted)
    rows = await _all_rows(conn, index_rows, counted)
    differences = [
        (index, await _difference(conn, index, entries.get(index.name), rows[index.name]))
        for index in index_rows
    ]
    mismatches = [
        IndexMismatch(index.name, index.table_name, how)
        for index, how in differences
        if how is not None
    ]
    for ranges in of_block_ranges:
        how = await missed_rows(conn, ranges, THROUGH_TABLE)
        mismatches += [] if how is None else [IndexMismatch(ranges.name, ranges.table_name, how)]
        counted.add(ranges.table_pages)
    return mismatches


def difference(entries: tuple[Entries, Entries] | None, rows: Rows) -> str | None:
    """Return how an index (its keys, and the rows it points to) differs from its table, or None."""
    if entries is None:
        return "not compared: Postgres does not read it from end to end in order"
    of_keys, of_rows = entries
    if of_keys.size != rows.size or of_rows.size != rows.size:
        sizes = (of_keys.size, of_rows.size)
        return f"{max(sizes, key=lambda size: abs(size - rows.size))} entries for {rows.size} rows"
    if of_keys.disordered or of_rows.disordered:
        return f"{max(of_keys.disordered, of_rows.disordered)} of {rows.size} entries out of order"
    if of_keys.checksum != rows.of_keys or of_rows.checksum != rows.of_rows:
        return f"{rows.size} entries, some of them not those of the rows"
    return None


async def _difference(
    conn: Connection, index: IndexRow, entries: tuple[Entries, Entries] | None, rows: Rows
) -> str | None:
    """Return how an index differs; not because rows have equal keys, each of which it finds."""
    how = difference(entries, rows)
    if how is None or entries is None or index.of_twins is None or entries[0].size <= rows.size:
        return how
    [twins] = await conn.fetch(index.of_twins, row=Rows)
    added = (Decimal() if value is None else value for value in rows)
    return difference(entries, Rows(*map(add, added, (value or Decimal() for value in twins))))


async def _all_entries(
    conn: Connection, index_rows: Sequence[IndexRow], counted: Counted
) -> dict[str, tuple[Entries, Entries]]:
    """Return the keys of each index, and the rows that it points to.

    Omit an index that Postgres would not read.
    """
    await conn.execute(THROUGH_INDEX)
    read: dict[str, tuple[Entries, Entries]] = {}
    for part in _parts(index_rows):
        used = await _used(conn, part)
        scans = await conn.fetch(_scans(used), row=Entries) if used else []
        read.update(
            (index.name, (scans[at], scans[at + 1]))
            for index, at in zip(used, range(0, len(scans), 2), strict=True)
        )
        counted.add(_pages(part))
    return read


async def _all_rows(
    conn: Connection, index_rows: Sequence[IndexRow], counted: Counted
) -> dict[str, Rows]:
    await conn.execute(THROUGH_TABLE)
    rows: dict[str, Rows] = {}
    for part in _tables(index_rows):
        sums: list[Decimal | None] = await conn.fetchval(part[0].of_table)
        rows.update(
            (index.name, Rows(sums[at] or Decimal(), *sums[at + 1 : at + 3]))
            for index, at in zip(part, range(0, len(sums), 3), strict=True)
        )
        counted.add(_table_pages(part))
    return rows


def _pages(index_rows: Sequence[IndexRow]) -> int:
    """Return about how many pages are read to compare indexes: as many as their tables have."""
    return sum(index.table_pages for index in index_rows)


def _table_pages(part: Sequence[IndexRow]) -> int:
    return part[0].table_pages


def _scans(part: Sequence[IndexRow]) -> str:
    """Return a statement with two rows per index: of its keys, and of the rows it points to."""
    return " UNION ALL ".join(sql for index in part for sql in (index.of_keys, index.of_rows))


async def _used(conn: Connection, part: Sequence[IndexRow]) -> list[IndexRow]:
    """Return the indexes that Postgres reads for their statements, by its plan."""
    [text] = json.loads(await conn.fetchval(f"EXPLAIN (COSTS OFF, FORMAT JSON) {_scans(part)}"))
    scans: list[dict[str, Any]] = text["Plan"]["Plans"]
    return [
        index
        for index, at in zip(part, range(0, len(scans), 2), strict=True)
        if _is_read(index, *scans[at : at + 2])
    ]


def _is_read(index: IndexRow, of_keys: dict[str, Any], of_rows: dict[str, Any]) -> bool:
    """Return whether these are plans of an index-only scan and of an index scan.

    The value of an expression is computed from the row, so keys with one take an index scan. A hash
    index is searched for each row of the table.
    """
    if index.is_hash:
        searches = {(None, "Sample Scan"), (index.name, "Index Scan")}
        return _ways(of_keys) == _ways(of_rows) == searches
    key_scans = {"Index Only Scan"} | ({"Index Scan"} if index.has_expressions else set())
    return _ways(of_keys) <= {(index.name, kind) for kind in key_scans} and _ways(of_rows) == {
        (index.name, "Index Scan")
    }


def _ways(plan: dict[str, Any]) -> set[tuple[str | None, str]]:
    """Return the leaf nodes of a plan, each with its index, and a sort if it has one."""
    below: list[dict[str, Any]] = plan.get("Plans", [])
    sorts = {(None, plan["Node Type"])} if "Sort" in plan["Node Type"] else set()
    return (
        sorts.union(*map(_ways, below)) if below else {(plan.get("Index Name"), plan["Node Type"])}
    )


def _parts(index_rows: Sequence[IndexRow]) -> Iterator[list[IndexRow]]:
    """Yield the indexes of small tables together, and each of a large table alone.

    No statement then takes longer than it must.
    """
    if small := [index for index in index_rows if index.table_pages < PAGES_TOGETHER]:
        yield small
    yield from ([index] for index in index_rows if index.table_pages >= PAGES_TOGETHER)


def _tables(index_rows: Sequence[IndexRow]) -> Iterator[list[IndexRow]]:
    return (list(part) for _, part in groupby(index_rows, lambda index: index.table_name))


# --------------------------------------------------------------------------------------------------
# Refuse to rely on a corrupt index.


async def refuse_corrupt_indexes(
    database: Database,
    work: str,
    tables: Collection[str] | None = None,
    *,
    report: Report = silent,
) -> None:
    """Compare the indexes of these tables, or of all, with the rows.

    ``work`` names the operation that would begin, as in "a purge". Each table is read once in full,
    and each of its indexes twice. Raise `StorageCorrupt` if an index is corrupt: the error names
    the indexes, and nothing has changed.
    """
    mismatches = await index_mismatches(database, tables, report=report)
    if mismatches:
        raise refusal(work, mismatches)


def refusal(work: str, mismatches: Collection[IndexMismatch]) -> StorageCorrupt:
    """Return the error that names the corrupt indexes and how to mend them."""
    named = ", ".join(
        f"{mismatch.name} of {mismatch.table_name} ({mismatch.found})" for mismatch in mismatches
    )
    commands = "; ".join(f"REINDEX INDEX CONCURRENTLY {mismatch.name}" for mismatch in mismatches)
    reason = (
        f"{work} would go by an index that does not agree with its table: {named}."
        f" Nothing was changed. Run {commands}; then `room-storage verify`"
    )
    error = StorageCorrupt(reason)
    error.ids = {
        "indexes": [mismatch.name for mismatch in mismatches]
    }  # the text ends with what to run
    return error
