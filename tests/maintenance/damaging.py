"""Indexes damaged by hand: missing rows, entries in another order, entries of other rows."""

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Final

import asyncpg

from storage.database.connection import Connection
from storage.database.pool import begun

SCHEMA: Final = (files("storage.database") / "schema.sql").read_text()
INDEXES: Final = sorted(
    {
        "alembic_version_pkc",
        *re.findall(r"^CREATE (?:UNIQUE )?INDEX (\w+)", SCHEMA, re.MULTILINE),
        *re.findall(r"CONSTRAINT (\w+) (?:PRIMARY KEY|UNIQUE)", SCHEMA),
    }
)
"""Every index of the schema, by name. A test compares them with the catalogue."""

BLOCK_RANGES: Final = frozenset(
    re.findall(r"^CREATE INDEX (\w+) ON \w+ USING brin", SCHEMA, re.MULTILINE)
)
"""Indexes that have a summary of each range of blocks: a row that they lack may still be found."""

INDEX_SCANS: Final = ("enable_indexscan", "enable_indexonlyscan", "enable_bitmapscan")
LITERALS: Final = {"text": "'x'", "boolean": "true", "bytea": "''", "int8multirange": "'{}'"}
CHECKED: Final = {
    ("archive_packs", "state"): "'writing'",
    ("lost_positions", "lost_upto"): "2",
    ("schema_compatibility", "code_revision"): "'0001'",
}
"""Values of rows that are made up, where a constraint asks for others."""

SQL_TABLE: Final = (
    "SELECT indrelid::regclass::text FROM pg_index WHERE indexrelid = $1::text::regclass"
)
SQL_PREDICATE: Final = (
    "SELECT COALESCE(pg_get_expr(indpred, indrelid), 'true') FROM pg_index "
    "WHERE indexrelid = $1::text::regclass"
)
SQL_COLUMNS: Final = """
SELECT a.attname::text AS name, format_type(a.atttypid, NULL) AS type
FROM pg_attribute a
WHERE a.attrelid = $1::text::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attnotnull
    AND NOT a.atthasdef
"""


async def blind(conn: asyncpg.Connection, index: str) -> int:
    """Rewrite all rows of a table while this index takes none; return how many rows it lacks."""
    table = await conn.fetchval(SQL_TABLE, index)
    async with conn.transaction():
        # With this role no foreign key deletes rows.
        await conn.execute("SET LOCAL session_replication_role = replica")
        for way in INDEX_SCANS:
            await conn.execute(f"SET LOCAL {way} = off")
        await conn.execute(
            "UPDATE pg_index SET indisready = false WHERE indexrelid = $1::text::regclass", index
        )
        await conn.execute(
            f"CREATE TEMP TABLE written_again ON COMMIT DROP AS SELECT * FROM {table}"
        )
        await conn.execute(f"DELETE FROM {table}")
        await conn.execute(f"INSERT INTO {table} SELECT * FROM written_again")
        if not await conn.fetchval(f"SELECT count(*) FROM {table}"):
            await _make_up(conn, table)
        await conn.execute(
            "UPDATE pg_index SET indisready = true WHERE indexrelid = $1::text::regclass", index
        )
        predicate = await conn.fetchval(SQL_PREDICATE, index)
        lacks: int = await conn.fetchval(f"SELECT count(*) FROM {table} WHERE {predicate}")
    return lacks


async def _make_up(conn: asyncpg.Connection, table: str) -> None:
    columns = [(row["name"], row["type"]) for row in await conn.fetch(SQL_COLUMNS, table)]
    values = [
        CHECKED.get((table, name), "'{}'" if kind.endswith("[]") else LITERALS.get(kind, "1"))
        for name, kind in columns
    ]
    await conn.execute(
        f"INSERT INTO {table} ({', '.join(name for name, _ in columns)}) "
        f"VALUES ({', '.join(values)})"
    )


async def exchange(conn: asyncpg.Connection, index: str, definition: str) -> None:
    """Replace this index by another, ``ON table (…)``: swap their files."""
    await conn.execute(f"CREATE INDEX exchanged ON {definition}")
    await conn.execute(
        "UPDATE pg_class c SET relfilenode = other.relfilenode FROM pg_class other "
        "WHERE (c.oid, other.oid) IN (($1::text::regclass, 'exchanged'::regclass), "
        "('exchanged'::regclass, $1::text::regclass))",
        index,
    )
    await conn.execute("DROP INDEX exchanged")


@asynccontextmanager
async def not_ready(conn: Connection, indexes: Iterable[str]) -> AsyncIterator[None]:
    """Keep rows written in the block out of these indexes, which are still read afterwards."""
    names = list(indexes)
    await conn.execute(
        "UPDATE pg_index SET indisready = false WHERE indexrelid = ANY($1::text[]::regclass[])",
        names,
    )
    yield
    await conn.execute(
        "UPDATE pg_index SET indisready = true WHERE indexrelid = ANY($1::text[]::regclass[])",
        names,
    )


async def rows_of_all_tables(conn: Connection) -> dict[str, str]:
    """Return the content of each table, read without an index.

    Positions are left out, as an open store advances them.
    """
    async with begun(conn):
        for way in INDEX_SCANS:
            await conn.execute(f"SET LOCAL {way} = off")
        names = await conn.fetchvals(
            "SELECT relname::text FROM pg_class WHERE relkind = 'r' "
            "AND relnamespace = 'public'::regnamespace AND relname <> 'stream_positions'"
        )
        return {
            name: await conn.fetchval(
                f"SELECT md5(string_agg(t::text, ' ' ORDER BY t::text)) FROM {name} t"
            )
            for name in names
        }
