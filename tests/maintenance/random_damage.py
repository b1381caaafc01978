"""Damage one row at random, in a transaction that is rolled back, and look whether it is found.

`damages` has every column of every derived table: its value changed, or exchanged with that of
another row; and of every table a row deleted, or stored twice under another key.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random
from typing import Final, NamedTuple

import asyncpg

from storage.database import Connection, Database
from storage.maintenance.verify import Finding, verify_database, verify_room

NOT_DERIVED: Final = {
    "account_data": "clients write it",
    "alembic_version": "migrations write it",
    "archive_garbage": "the sweep of the archive reads it",
    "archive_packs": "the archive is not in the database",
    "background_jobs": "migrations write it",
    "cache_invalidations": "old facts, which nothing reads again",
    "cursors": "consumers write it",
    "defined_streams": "the homeserver defines them",
    "deployment": "its identity",
    "dictionaries": "without one, events are not readable, and are found",
    "erased_users": "users request it",
    "gap_failures": "it is the memory of requests to other servers",
    "import_events": "an import stages events in it",
    "lost_positions": "restores write it",
    "published_facts": "the homeserver writes it",
    "purge_jobs": "purges write it",
    "purge_retained_events": "purges write it",
    "purged_streams": "purges write it",
    "receipts": "clients write it",
    "schema_compatibility": "migrations write it",
    "sliding_rooms": "the memory of what clients were sent; its references are checked",
    "sliding_connections": "clients write it",
    "stream_positions": "they only grow, and may be larger than any fact",
    "to_device": "clients write it",
    "writers": "processes write it",
}
"""Tables that do not follow from events."""

SQL_COLUMNS: Final = """
SELECT c.relname::text AS table_name, a.attname::text AS name,
    format_type(a.atttypid, NULL) AS type, a.attnotnull AS is_needed,
    EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisunique
        AND a.attnum = ANY(i.indkey)) AS is_key
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace
ORDER BY c.relname, a.attnum
"""

OTHER: Final = "(SELECT o.{name} FROM {table} o WHERE o.ctid = $2::text::tid)"
CHANGES: Final[Mapping[str, tuple[str, ...]]] = {
    "bigint": ("{name} + 1", "{name} - 1", OTHER, "1"),
    "integer": ("{name} + 1", "{name} - 1", OTHER),
    "smallint": ("{name} + 1::smallint", "{name} - 1::smallint", OTHER),
    "boolean": ("NOT COALESCE({name}, false)",),
    "text": ("{name} || 'x'", OTHER),
    "bytea": ("set_byte({name}, length({name}) - 1, get_byte({name}, length({name}) - 1) # 4)",),
    "bigint[]": (OTHER, "{name}[2:]", "{name} || 1::bigint"),
    "integer[]": (OTHER, "{name}[2:]", "{name} || 1"),
    "text[]": (OTHER, "{name} || 'x'::text"),
    "int8multirange": (OTHER, "'{{}}'", "'{{[0,)}}'", "{name} - '{{[0,1100000000000)}}'"),
}

class Column(NamedTuple):
    """A column; ``is_key``: a unique index has it."""

    table_name: str
    name: str
    type: str
    is_needed: bool
    is_key: bool


class Kind(NamedTuple):
    """A kind of damage. ``column`` is None for a whole row."""

    table: str
    column: Column | None
    way: str  # changed, lost (NULL), exchanged; deleted, doubled

    def __str__(self) -> str:
        return f"{self.table}.{self.column.name if self.column else '*'} {self.way}"


class Share(NamedTuple):
    """How many damages of a kind there were, and how many of them were found."""

    found: int
    made: int


async def columns(driver: asyncpg.Connection) -> list[Column]:
    return [Column(*row) for row in await driver.fetch(SQL_COLUMNS)]


def kinds(of: Iterable[Column]) -> list[Kind]:
    """Every kind of damage of the derived tables."""
    known = [one for one in of if one.table_name not in NOT_DERIVED]
    rows = [Kind(t, None, w) for t in sorted({one.table_name for one in known})
            for w in ("deleted", "doubled")]
    values = [Kind(one.table_name, one, w) for one in known
              for w in ("changed", "exchanged", *(() if one.is_needed else ("lost",)))]
    return rows + values


async def damage(driver: asyncpg.Connection, kind: Kind, of: Iterable[Column], rng: Random) -> tuple[str, list[str]] | None:
    """Damage a row; return what was done, or None if the database refuses it or has no such row."""
    table = kind.table
    places = await driver.fetch(f"SELECT ctid::text FROM {table} ORDER BY md5({table}::text)")
    if not places:
        return None
    one, other = rng.choice(places)[0], rng.choice(places)[0]
    rooms = await rooms_of(driver, table, one)
    mine = [column for column in of if column.table_name == table]
    try:
        async with driver.transaction():
            await driver.execute("SET LOCAL session_replication_role = replica")
            before = await driver.fetchrow(f"SELECT * FROM {table} WHERE ctid = $1::text::tid", one)
            done = await WAYS[kind.way](driver, kind, mine, rng, one, other)
    except asyncpg.IntegrityConstraintViolationError:
        return None
    except asyncpg.DataError:
        return None
    return (f"{done}: {dict(before)}", rooms) if done else None


async def _change(driver, kind, mine, rng, one, other):
    column = kind.column
    way = rng.choice(CHANGES[column.type])
    value = way.format(name=column.name, table=kind.table)
    if column.type.startswith("bigint") and "||" not in way and way != "1":
        pass
    arguments = [one, other] if "$2" in value else [one]
    changed = await driver.fetch(
        f"UPDATE {kind.table} SET {column.name} = {value} WHERE ctid = $1::text::tid "
        f"AND {column.name} IS DISTINCT FROM {value} RETURNING {column.name}::text", *arguments)
    return f"{way} -> {changed[0][0]}" if changed else None


async def _lose(driver, kind, mine, rng, one, other):
    column = kind.column
    changed = await driver.fetch(
        f"UPDATE {kind.table} SET {column.name} = NULL WHERE ctid = $1::text::tid "
        f"AND {column.name} IS NOT NULL RETURNING 1", one)
    return "NULL" if changed else None


async def _exchange(driver, kind, mine, rng, one, other):
    name, table = kind.column.name, kind.table
    same = await driver.fetchval(
        f"SELECT count(DISTINCT {name}::text) FROM {table} WHERE ctid = ANY(ARRAY[$1::text, $2::text]::tid[]) AND {name} IS NOT NULL", one, other)
    if same < 2:
        return None
    await driver.execute(
        f"CREATE TEMP TABLE pair ON COMMIT DROP AS SELECT ctid::text AS place, * FROM {table} WHERE ctid = ANY(ARRAY['{one}', '{other}']::tid[])")
    await driver.execute(f"DELETE FROM {table} WHERE ctid = ANY(ARRAY['{one}', '{other}']::tid[])")
    names = ", ".join(column.name for column in mine)
    values = ", ".join(
        f"(SELECT o.{name} FROM pair o WHERE o.place <> pair.place)" if column.name == name else column.name
        for column in mine)
    await driver.execute(f"INSERT INTO {table} ({names}) SELECT {values} FROM pair")
    row = await driver.fetchval("SELECT string_agg(pair::text, ' ') FROM pair")
    return f"exchanged {row}"


async def _delete(driver, kind, mine, rng, one, other):
    await driver.execute(f"DELETE FROM {kind.table} WHERE ctid = $1::text::tid", one)
    return "deleted"


async def _double(driver, kind, mine, rng, one, other):
    keys = [column for column in mine if column.is_key]
    ints = [column for column in keys if column.type in ("bigint", "integer", "smallint")]
    # the id of an event is in a unique index only where servers choose ids
    changed = {column.name for column in (ints or keys)} if kind.table == "events" else {rng.choice(ints or keys).name}
    values = {
        column.name: (f"(SELECT max({column.name}) + 1 FROM {kind.table})" if column.type != "text" else f"{column.name} || 'x'")
        if column.name in changed else column.name for column in mine}
    names = ", ".join(values)
    await driver.execute(
        f"INSERT INTO {kind.table} ({names}) SELECT {', '.join(values.values())} FROM {kind.table} WHERE ctid = $1::text::tid", one)
    return f"doubled with another {sorted(changed)}"


WAYS = {"changed": _change, "lost": _lose, "exchanged": _exchange, "deleted": _delete, "doubled": _double}


async def first_finding(conn: Connection, room_ids: list[str], server_name: str) -> Finding | None:
    """Return the first finding of verification in the connection's transaction."""
    stored = set(await conn.fetchvals("SELECT room_id FROM rooms"))
    for room_id in room_ids:
        if room_id not in stored:
            continue
        async for one in verify_room(conn, room_id, server_name=server_name):
            return one
    async for one in verify_database(conn):
        return one
    return None


async def rooms_of(driver: asyncpg.Connection, table: str, place: str) -> list[str]:
    """Return all rooms, that of a row first."""
    own = None
    if await driver.fetchval("SELECT count(*) FROM pg_attribute WHERE attrelid = $1::text::regclass AND attname = 'room_nid'", table):
        own = await driver.fetchval(f"SELECT room_id FROM rooms WHERE room_nid = (SELECT room_nid FROM {table} WHERE ctid = $1::text::tid)", place)
    every = [row[0] for row in await driver.fetch("SELECT room_id FROM rooms ORDER BY room_id = $1::text DESC NULLS LAST, 1", own)]
    return every
