"""Reading indexes and tables, and comparing them."""

import json
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from itertools import groupby
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.maintenance.indexes.catalogue import IndexRow, indexes

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
"""The index is the only way left.

Operators are dear, so that no other index is read whose rows would have to be filtered by the
predicate.
"""

THROUGH_TABLE: Final[LiteralString] = """
SET LOCAL enable_seqscan = on;
SET LOCAL enable_bitmapscan = off;
SET LOCAL enable_tidscan = off;
SET LOCAL enable_indexscan = off;
SET LOCAL enable_indexonlyscan = off;
SET LOCAL cpu_operator_cost TO DEFAULT
"""
"""A sequential scan is the only way left."""

PAGES_TOGETHER: Final = 1_000
"""Indexes of tables of fewer pages share statements."""


class Lie(NamedTuple):
    """An index that is not what its table has.

    ``found`` says how it differs, with numbers of entries.
    """

    name: str
    table_name: str
    found: str


class Entries(NamedTuple):
    """What was read through an index: the number of entries, the sum of their hashes (None for none), how many stand before a smaller one."""

    size: Decimal
    checksum: Decimal | None
    disordered: Decimal


class Rows(NamedTuple):
    """What was read of its table: the number of rows that belong in the index, the sums of the hashes of their keys and of their keys with their places."""

    size: Decimal
    of_keys: Decimal | None
    of_rows: Decimal | None


async def lies(database: Database, tables: Collection[str] | None = None) -> list[Lie]:
    """Return the indexes that lie, of these tables or of all in the schema.

    Reads only, in one snapshot; writers may go on.

    `DatabaseUnavailable` where one index, or table, takes longer than
    `Config.statement_timeout_ms`.
    """
    async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
        return await lies_in_snapshot(conn, tables)


async def lies_in_snapshot(conn: Connection, tables: Collection[str] | None = None) -> list[Lie]:
    """The same in the transaction of the caller, in which statements afterwards are planned badly."""
    found = await indexes(conn, tables)
    entries = await _all_entries(conn, found)
    rows = await _all_rows(conn, found)
    told = [(index, difference(entries.get(index.name), rows[index.name])) for index in found]
    return [Lie(index.name, index.table_name, how) for index, how in told if how is not None]


def difference(entries: tuple[Entries, Entries] | None, rows: Rows) -> str | None:
    """Return how an index (its keys, and the rows that it leads to) differs from its table; None if it does not."""
    if entries is None:
        return "not compared: Postgres does not read it from end to end in order"
    of_keys, of_rows = entries
    if of_keys.size != rows.size or of_rows.size != rows.size:
        return f"{min(of_keys.size, of_rows.size, key=lambda size: -abs(size - rows.size))} entries for {rows.size} rows"
    if of_keys.disordered or of_rows.disordered:
        return f"{max(of_keys.disordered, of_rows.disordered)} of {rows.size} entries out of order"
    if of_keys.checksum != rows.of_keys or of_rows.checksum != rows.of_rows:
        return f"{rows.size} entries, some of them not those of the rows"
    return None


async def _all_entries(
    conn: Connection, found: Sequence[IndexRow]
) -> dict[str, tuple[Entries, Entries]]:
    """Of each index its keys, and the rows that it leads to.

    An index that Postgres would not read is left out.
    """
    await conn.execute(THROUGH_INDEX)
    read: dict[str, tuple[Entries, Entries]] = {}
    for part in _parts(found):
        used = await _used(conn, part)
        scans = await conn.fetch(_scans(used), row=Entries) if used else []
        read.update(
            (index.name, (scans[at], scans[at + 1]))
            for index, at in zip(used, range(0, len(scans), 2), strict=True)
        )
    return read


async def _all_rows(conn: Connection, found: Sequence[IndexRow]) -> dict[str, Rows]:
    """The rows of each index, by its table."""
    await conn.execute(THROUGH_TABLE)
    rows: dict[str, Rows] = {}
    for part in _tables(found):
        sums: list[Decimal | None] = await conn.fetchval(part[0].of_table)
        rows.update(
            (index.name, Rows(sums[at] or Decimal(), *sums[at + 1 : at + 3]))
            for index, at in zip(part, range(0, len(sums), 3), strict=True)
        )
    return rows


def _scans(part: Sequence[IndexRow]) -> str:
    """One statement with two rows for each index: of its keys, and of the rows that it leads to."""
    return " UNION ALL ".join(one for index in part for one in (index.of_keys, index.of_rows))


async def _used(conn: Connection, part: Sequence[IndexRow]) -> list[IndexRow]:
    """The indexes that Postgres reads for their statements, by its plan."""
    [told] = json.loads(await conn.fetchval(f"EXPLAIN (COSTS OFF, FORMAT JSON) {_scans(part)}"))
    scans: list[dict[str, Any]] = told["Plan"]["Plans"]
    return [
        index
        for index, at in zip(part, range(0, len(scans), 2), strict=True)
        if _is_read(index, *scans[at : at + 2])
    ]


def _is_read(index: IndexRow, of_keys: dict[str, Any], of_rows: dict[str, Any]) -> bool:
    """Whether these are plans of an index-only scan and of an index scan.

    What an expression comes to is worked out from the row.
    """
    key_scans = {"Index Only Scan"} | ({"Index Scan"} if index.has_expressions else set())
    return _ways(of_keys) <= {(index.name, kind) for kind in key_scans} and _ways(of_rows) == {
        (index.name, "Index Scan")
    }


def _ways(plan: dict[str, Any]) -> set[tuple[str | None, str]]:
    """How a plan comes to its rows: each node at the end of the tree, with its index."""
    below: list[dict[str, Any]] = plan.get("Plans", [])
    sorts = {(None, plan["Node Type"])} if "Sort" in plan["Node Type"] else set()
    return (
        sorts.union(*map(_ways, below)) if below else {(plan.get("Index Name"), plan["Node Type"])}
    )


def _parts(found: Sequence[IndexRow]) -> Iterator[list[IndexRow]]:
    """The indexes of small tables together, each of a large table alone: no statement takes longer than it must."""
    if small := [index for index in found if index.table_pages < PAGES_TOGETHER]:
        yield small
    yield from ([index] for index in found if index.table_pages >= PAGES_TOGETHER)


def _tables(found: Sequence[IndexRow]) -> Iterator[list[IndexRow]]:
    """The indexes of each table together."""
    return (list(part) for _, part in groupby(found, lambda index: index.table_name))
