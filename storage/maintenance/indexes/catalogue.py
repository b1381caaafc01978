"""The indexes of the schema, each with the statements that read all of it, and its table.

The statements are made from Postgres' catalogue, which quotes the names and expressions. So a new
index is compared without a change here. A sum of hashes does not depend on the order of rows. For
`state_groups_room_idx`, the keys are read by

  SELECT count(*)::numeric, sum(hash_record_extended(e.entry, 0)), (count(*) FILTER (WHERE e.key <
  e.before))::numeric FROM (
    SELECT ROW(room_nid, state_group) AS entry, ROW(room_nid, state_group) AS key,
      lag(ROW(room_nid, state_group)) OVER (ORDER BY room_nid, state_group) AS before
    FROM state_groups
    WHERE true AND (true OR ctid < ALL (array_fill('(0,0)'::tid, ARRAY[1000])))
  ) AS e

and the rows that it points to by the same statement with `ctid` in each entry, which no index-only
scan can return. The second condition is true wherever the predicate of the index (here `true`) is,
so Postgres leaves it out where it reads that index. With another index that has the same key and
more rows, it would have to be evaluated for each row, and a comparison with 1000 values is
expensive.

A hash index cannot be read from end to end. So each row of the table is searched for by its key,
and what the index finds is compared with the rows. For `events_event_id_idx`

  SELECT count(*)::numeric, sum(hash_record_extended(ROW(event_id), 0)), 0::numeric
  FROM (SELECT event_id AS key FROM events TABLESAMPLE SYSTEM (100) WHERE true) AS t
  CROSS JOIN LATERAL (SELECT ctid, * FROM events WHERE event_id = t.key AND true OFFSET 0) AS f

A sample of all rows is a scan of the table that no index can replace. Two rows with one key are
found twice each. If an index finds more than the rows, rows with equal keys are counted once more
(``of_twins``): they belong to the check of doubled events, and the index is right.
"""

from collections.abc import Collection
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection

SQL_INDEXES: Final[LiteralString] = """
WITH
index AS (
    SELECT c.relname::text AS name, t.relname::text AS table_name,
        i.indrelid::regclass::text AS quoted_table, i.indexprs IS NOT NULL AS has_expressions,
        m.amname = 'hash' AS is_hash,
        (pg_relation_size(t.oid) / current_setting('block_size')::int)::int AS table_pages,
        COALESCE(pg_get_expr(i.indpred, i.indrelid), 'true') AS predicate,
        (SELECT string_agg(pg_get_indexdef(c.oid, n, true), ', ' ORDER BY n)
            FROM generate_series(1, i.indnkeyatts) AS n) AS key,
        (SELECT string_agg(pg_get_indexdef(c.oid, n, true), ', ' ORDER BY n)
            FROM generate_series(1, i.indnatts) AS n) AS entry
    FROM pg_index i
    JOIN pg_class c ON c.oid = i.indexrelid
    JOIN pg_class t ON t.oid = i.indrelid
    JOIN pg_am m ON m.oid = c.relam
    WHERE t.relnamespace = quote_ident(current_schema())::regnamespace
        AND i.indisvalid  -- Postgres reads no invalid index, and another check reports them
        AND m.amname <> 'brin'  -- block_ranges.py
        AND ($1::text[] IS NULL OR t.relname = ANY($1::text[]))
        -- a role reads nothing through the indexes of a table that it may not read
        AND has_table_privilege(t.oid, 'SELECT')
),
form AS (
    SELECT 'SELECT count(*)::numeric, sum(hash_record_extended(e.entry, 0)), '
        '(count(*) FILTER (WHERE e.key < e.before))::numeric '
      'FROM (SELECT ROW(%1$s) AS entry, ROW(%2$s) AS key, '
        'lag(ROW(%2$s)) OVER (ORDER BY %2$s) AS before FROM %3$s WHERE %4$s '
        'AND (%4$s OR ctid < ALL (array_fill(''(0,0)''::tid, ARRAY[1000])))) AS e' AS scan,
    'SELECT count(*)::numeric, sum(hash_record_extended(ROW(%1$s), 0)), 0::numeric '
      'FROM (SELECT %2$s AS key FROM %3$s TABLESAMPLE SYSTEM (100) WHERE %4$s) AS t '
      'CROSS JOIN LATERAL (SELECT ctid, * FROM %3$s WHERE %2$s = t.key AND %4$s OFFSET 0) AS f'
      AS search,
    'SELECT COALESCE(sum((n - 1) * n), 0)::numeric, COALESCE(sum((n - 1) * of_keys), 0)::numeric, '
      'COALESCE(sum((n - 1) * of_rows), 0)::numeric '
      'FROM (SELECT count(*) AS n, sum(hash_record_extended(ROW(%1$s), 0)) AS of_keys, '
        'sum(hash_record_extended(ROW(ctid, %1$s), 0)) AS of_rows FROM %3$s WHERE %4$s '
        'GROUP BY %2$s HAVING count(*) > 1) AS t' AS twins,
    'count(*) FILTER (WHERE %1$s), '
      'sum(hash_record_extended(ROW(%2$s), 0)) FILTER (WHERE %1$s), '
        'sum(hash_record_extended(ROW(ctid, %2$s), 0)) FILTER (WHERE %1$s)' AS sums
)
SELECT i.name, i.table_name, i.has_expressions, i.is_hash, i.table_pages,
    format(way.read, i.entry, i.key, i.quoted_table, i.predicate) AS of_keys,
    format(way.read, 'ctid, ' || i.entry, i.key, i.quoted_table, i.predicate) AS of_rows,
    format('SELECT ARRAY[%s]::numeric[] FROM %s',
        string_agg(format(form.sums, i.predicate, i.entry), ', ') OVER whole_table,
            i.quoted_table) AS of_table,
    CASE WHEN i.is_hash
        THEN format(form.twins, i.entry, i.key, i.quoted_table, i.predicate) END AS of_twins
FROM index i
CROSS JOIN form
CROSS JOIN LATERAL (SELECT CASE WHEN i.is_hash THEN form.search ELSE form.scan END AS read) AS way
WINDOW whole_table AS (PARTITION BY i.table_name
    ORDER BY i.name ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)
ORDER BY i.table_name, i.name
"""


class IndexRow(NamedTuple):
    """An index.

    ``of_keys``, ``of_rows``: statements with one row: entries, sum of hashes, entries that come
    before a smaller one.

    ``of_table``: a statement with one array for all indexes of the table, in the order of their
    names. For each index it has the number of rows, the sum of the hashes of their keys, and the
    same with the `ctid` of each row. ``of_twins``: of a hash index, a statement with one row: what
    the index finds above that because of rows with equal keys.
    """

    name: str
    table_name: str
    has_expressions: bool
    is_hash: bool
    table_pages: int
    of_keys: str
    of_rows: str
    of_table: str
    of_twins: str | None


async def indexes(conn: Connection, tables: Collection[str] | None = None) -> list[IndexRow]:
    """Return the indexes of these tables, or of all, by table, without those of block ranges."""
    return await conn.fetch(SQL_INDEXES, None if tables is None else list(tables), row=IndexRow)
