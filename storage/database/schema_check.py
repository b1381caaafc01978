"""Compare the schema of a database with schema.sql, for `alembic check`.

It runs schema.sql in a schema of its own, in a transaction that it rolls back. So one Postgres has
made both, and the role needs the privilege CREATE on the database. It compares tables, columns,
constraints, indexes, sequences, functions, triggers and views, and no comments, privileges or rows.
Further tables, indexes and functions are the operator's own, and are not reported. A further
column, constraint or trigger of one of our tables is.
"""

from pathlib import Path
from typing import Any, Final, LiteralString

ON_TABLES: Final = ("column", "constraint", "trigger")
"""Kinds whose additional objects change how the tables work."""

SCRATCH: Final = "room_storage_check"

SQL_CATALOGUE: Final[LiteralString] = """
WITH
relation AS (
    SELECT c.oid, c.relname, c.relkind, c.reloptions
    FROM pg_class c
    WHERE c.relnamespace = to_regnamespace(quote_ident(current_schema()))
        AND c.relname NOT LIKE 'alembic_version%'
)
SELECT 'table' AS kind, r.relname::text AS name, format('%s %s', r.relkind, r.reloptions) AS text
FROM relation r
WHERE r.relkind IN ('r', 'p', 'v', 'm')
UNION ALL
SELECT 'column', format('%s.%s', r.relname, a.attname), format('%s %s %s %s %s %s',
    format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attcollation::regcollation, a.attstorage,
    a.attidentity, pg_get_expr(d.adbin, d.adrelid))
FROM relation r
JOIN pg_attribute a ON a.attrelid = r.oid
LEFT JOIN pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum
WHERE r.relkind IN ('r', 'p', 'v', 'm') AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT 'constraint', format('%s.%s', r.relname, c.conname), pg_get_constraintdef(c.oid)
FROM relation r
JOIN pg_constraint c ON c.conrelid = r.oid
UNION ALL
-- the name of the table comes with its schema
SELECT 'index', i.relname, format('%s %s %s', r.relname, i.reloptions, x.indisvalid)
    || regexp_replace(pg_get_indexdef(i.oid), '^.*? USING ', ' ')
FROM relation r
JOIN pg_index x ON x.indrelid = r.oid
JOIN pg_class i ON i.oid = x.indexrelid
UNION ALL
SELECT 'sequence', r.relname, format('%s %s %s %s %s %s %s',
    s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcycle, s.seqcache)
FROM relation r
JOIN pg_sequence s ON s.seqrelid = r.oid
UNION ALL
SELECT 'trigger', format('%s.%s', r.relname, t.tgname),
    format('%s %s', t.tgenabled, pg_get_triggerdef(t.oid, true))
FROM relation r
JOIN pg_trigger t ON t.tgrelid = r.oid
WHERE NOT t.tgisinternal
UNION ALL
SELECT 'view', r.relname, pg_get_viewdef(r.oid)
FROM relation r
WHERE r.relkind IN ('v', 'm')
UNION ALL
SELECT 'function', format('%s(%s)', p.proname, pg_get_function_identity_arguments(p.oid)),
    format('%s %s %s %s %s %s %s %s %s %s %s', pg_get_function_arguments(p.oid),
        pg_get_function_result(p.oid), l.lanname, p.provolatile, p.proparallel, p.proisstrict,
        p.prosecdef, p.procost, p.prorows, p.proconfig, p.prosrc)
    || COALESCE(pg_get_function_sqlbody(p.oid), '')
FROM pg_proc p
JOIN pg_language l ON l.oid = p.prolang
WHERE p.pronamespace = to_regnamespace(quote_ident(current_schema())) AND p.prokind <> 'a'
"""


def schema_script() -> str:
    return (Path(__file__).parent / "schema.sql").read_text(encoding="utf-8")


async def differences(driver: Any) -> list[str]:
    """Return how the schema of a session differs from schema.sql; nothing of it stays."""
    found = await _catalogue(driver)
    transaction = driver.transaction()
    await transaction.start()
    try:
        scratch = f"{SCRATCH}_{driver.get_server_pid()}"
        await driver.execute(f"CREATE SCHEMA {scratch}; SET LOCAL search_path TO {scratch}")
        await driver.execute(schema_script())
        wanted = await _catalogue(driver)
    finally:
        await transaction.rollback()
    return list(_compared(found, wanted))


async def _catalogue(driver: Any) -> dict[tuple[str, str], str]:
    return {(row["kind"], row["name"]): row["text"] for row in await driver.fetch(SQL_CATALOGUE)}


def _compared(found: dict[tuple[str, str], str], wanted: dict[tuple[str, str], str]) -> list[str]:
    """Name the objects that are missing, that differ, or that change how a table works."""
    tables = {name for kind, name in wanted if kind == "table"}
    lines = []
    for key in sorted(found.keys() | wanted.keys()):
        kind, name = key
        if key not in found:
            lines.append(f"{kind} {name} is missing")
        elif key in wanted:
            if found[key] != wanted[key]:
                lines.append(f"{kind} {name} differs")
        elif kind in ON_TABLES and name.partition(".")[0] in tables:
            lines.append(f"{kind} {name} is not of this release")
    return lines
