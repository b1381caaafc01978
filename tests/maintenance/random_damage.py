"""Damage one row at random, in a transaction that is rolled back, and look whether it is found.

`kinds` has every column of every derived table: its value changed, lost, or exchanged with that of
another row; and of every table a row deleted, or stored twice under another key.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from random import Random
from typing import Final, NamedTuple

import asyncpg

import storage
from storage.database import Connection
from storage.maintenance.verify import Finding, verify_database, verify_room
from storage.testing import (
    ODD_SOME,
    SHAPES,
    Odd,
    RoomBuilder,
    build_room,
    deliver_late,
    deliver_with_gap,
)
from tests.maintenance.rooms import LIVELY, SERVER, deliver

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
    "sliding_connections": "clients write it",
    "sliding_rooms": "it is the memory of what clients were sent; its references are checked",
    "stream_positions": "they only grow, and may be larger than any fact",
    "to_device": "clients write it",
    "writers": "processes write it",
}
"""Tables that do not follow from events."""

EXPLAINED: Final = {
    "audiences.audience": "exchanged for one with the same members",
    "audiences.opened_topological": "less by one is within the slack of reads",
    "auth_chains.chain_nid": "another number of a chain that no link leads to",
    "events.arrival_ordering": "follows from nothing else",
    "events.audience": "exchanged for one with the same members",
    "events.backfilled": "of a rejected event, which no history shows",
    "events.in_order_ts": "a later time, or the own one where that is in time order",
    "events.received_ts": "follows from nothing else",
    "events.refused": "the verdict of the caller",
    "events.rejected": "other words of the reason",
    "events.soft_failed": "a check against the state of that moment",
    "events.superseded": "of a refused event",
    "events.writer_nid": "follows from nothing else",
    "memberships.forgotten": "users request it",
    "memberships.stream_ordering": "a later event's, as after an overruled membership",
    "memberships.writer_nid": "without a change of the state, follows from nothing else",
    "out_of_band_memberships.stripped_state": "as the other server sent it",
    "past_visibility.*": "a second row for no audience",
    "past_visibility.first_audience": "a smaller one, below which there is no audience",
    "past_visibility.invited_audiences": "empty in place of NULL",
    "past_visibility.topological_ranges": "wider than needed",
    "rooms.completed_at": "at no delta",
    "rooms.in_order_ts": "larger than needed",
    "rooms.max_topological_ordering": "larger than needed",
    "rooms.moves": "larger than needed",
    "rooms.next_audience": "larger than needed",
    "rooms.out_of_range": "wider than needed",
    "rooms.removals": "counts for plans under way",
    "rooms.write_version": "counts for plans under way",
    "state_deltas.stream_ordering": "within a fork, where no single event has the room's state",
    "state_groups.*": "a second group that nothing refers to: `gc` frees it",
    "state_groups.digest": "NULL: it is not found for a later merge",
    "state_groups.runs": "the same number of rows at other levels",
    "visibility.first_audience": "without past visibility",
    "visibility.invited_audiences": "empty in place of NULL",
}
"""Columns, or whole rows, of which some damage changes no answer or cannot be known, and why."""

KEPT: Final = {
    "events.*": "the bytes of the deleted event are lost",
    "events.encoding": "whether bytes are censored; received ones that fit their hash are not",
    "events.event_nid": "an exchange, where an event came before its parents",
    "events.json": "bytes",
    "events.room_nid": "the bytes are read by it",
    "events.writer_nid": "an unknown writer: follows from nothing else",
    "rooms.*": "the room of the events: only this row names it",
    "rooms.room_id": "the bytes are read by it",
    "rooms.room_nid": "the room of the events",
}
"""Columns, or whole rows, of which some damage is found and not mended, and why."""

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

OTHER: Final = "(SELECT o.{name} FROM {table} o WHERE o.ctid = '{other}'::tid)"
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
    way: str

    @property
    def place(self) -> str:
        return f"{self.table}.{'*' if self.column is None else self.column.name}"


class DamagePlaces(NamedTuple):
    """Two rows of a table, and its columns."""

    table: str
    one: str
    other: str
    columns: list[Column]


async def fill(dsn: str) -> None:
    """Store rooms in which the derived tables have rows."""
    odd = Odd(rejected=0.03, early_redaction=0.03)
    lively = build_room(LIVELY.replaced(odd=odd), 90, seed=11, sign=False)
    forked = SHAPES["fork_heavy"].replaced(odd=ODD_SOME)
    late = build_room(forked, 40, seed=5, version="1", sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, deliver_with_gap(lively, 30, 38), batch=40)
        await deliver(store, deliver_late(late, 3), batch=9)
        await store.append(restless_room().pdus)


def restless_room() -> RoomBuilder:
    """A local user joins and leaves so often that old ranges are rows of past visibility."""
    room = RoomBuilder("11", seed=3, sign=False)
    room.start(room.user(1))
    for _ in range(20):
        room.join(room.user(2))
        room.message(room.user(2))
        room.leave(room.user(2))
        room.message(room.user(1))
    return room


async def columns(driver: asyncpg.Connection) -> list[Column]:
    return [Column(*row) for row in await driver.fetch(SQL_COLUMNS)]


def kinds(known: Iterable[Column]) -> list[Kind]:
    """Every kind of damage of the derived tables."""
    derived = [one for one in known if one.table_name not in NOT_DERIVED]
    tables = sorted({one.table_name for one in derived})
    return [Kind(table, None, way) for table in tables for way in ("deleted", "doubled")] + [
        Kind(one.table_name, one, way)
        for one in derived
        for way in ("changed", "exchanged", *(() if one.is_needed else ("lost",)))
    ]


async def damage(
    driver: asyncpg.Connection, kind: Kind, known: Iterable[Column], rng: Random
) -> str | None:
    """Damage a row; return what was done, or None if the database refuses it or has no such row."""
    table = kind.table
    rows = await driver.fetch(  # the same in every run: without the clock's column
        f"SELECT ctid::text FROM {table} ORDER BY md5((to_jsonb({table}) - 'received_ts')::text)"
    )
    if not rows:
        return None
    own = [column for column in known if column.table_name == table]
    places = DamagePlaces(table, rng.choice(rows)[0], rng.choice(rows)[0], own)
    sql = f"SELECT {table}::text FROM {table} WHERE ctid = '{places.one}'::tid"
    before = await driver.fetchval(sql)
    try:
        async with driver.transaction():
            # with this role, no foreign key and no trigger refuses it
            await driver.execute("SET LOCAL session_replication_role = replica")
            done = await _done(driver, kind, places, rng)
    except (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError):
        return None
    return None if done is None else f"{kind.place} {kind.way}: {done}; it was {before}"


async def _done(
    driver: asyncpg.Connection, kind: Kind, places: DamagePlaces, rng: Random
) -> str | None:
    if kind.column is not None and kind.way == "exchanged":
        return await _exchange(driver, kind.column, places)
    if kind.column is not None:
        way = "NULL" if kind.way == "lost" else rng.choice(CHANGES[kind.column.type])
        value = way.format(name=kind.column.name, table=places.table, other=places.other)
        return await _set(driver, kind.column, places, value)
    if kind.way == "doubled":
        return await _double(driver, places, rng)
    await driver.execute(f"DELETE FROM {places.table} WHERE ctid = '{places.one}'::tid")
    return "deleted"


async def _set(
    driver: asyncpg.Connection, column: Column, places: DamagePlaces, value: str
) -> str | None:
    changed = await driver.fetch(
        f"UPDATE {places.table} SET {column.name} = {value} WHERE ctid = '{places.one}'::tid "
        f"AND {column.name} IS DISTINCT FROM {value} RETURNING {column.name}::text"
    )
    return f"{value} = {changed[0][0]}" if changed else None


async def _exchange(driver: asyncpg.Connection, column: Column, places: DamagePlaces) -> str | None:
    """Exchange a value of two rows, which are written anew for the sake of unique indexes."""
    name, table = column.name, places.table
    both = f'ctid = ANY(\'{{"{places.one}","{places.other}"}}\'::tid[])'
    await driver.execute(
        f"CREATE TEMP TABLE pair ON COMMIT DROP AS SELECT ctid AS place, * FROM {table} "
        f"WHERE {both}"
    )
    if await driver.fetchval(f"SELECT count(DISTINCT {name}::text) FROM pair") < 2:
        return None
    await driver.execute(f"DELETE FROM {table} WHERE {both}")
    other = f"(SELECT o.{name} FROM pair o WHERE o.place <> pair.place)"
    names = [one.name for one in places.columns]
    values = ", ".join(other if one == name else one for one in names)
    await driver.execute(f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} FROM pair")
    pair = await driver.fetchval("SELECT string_agg(pair::text, ' ') FROM pair")
    return f"in {pair}"


async def _double(driver: asyncpg.Connection, places: DamagePlaces, rng: Random) -> str:
    """Store a row twice, under another key; an event under its own id."""
    keys = [one for one in places.columns if one.is_key]
    numbers = [one for one in keys if one.type != "text"] or keys
    chosen = numbers if places.table == "events" else [rng.choice(numbers)]
    values = {one.name: one.name for one in places.columns}
    for key in chosen:
        values[key.name] = (
            f"{key.name} || 'x'"
            if key.type == "text"
            else f"(SELECT max({key.name}) + 1 FROM {places.table})"
        )
    await driver.execute(
        f"INSERT INTO {places.table} ({', '.join(values)}) SELECT {', '.join(values.values())} "
        f"FROM {places.table} WHERE ctid = '{places.one}'::tid"
    )
    return f"under another {[key.name for key in chosen]}"


async def found_in(conn: Connection, server_name: str) -> AsyncIterator[Finding]:
    """Yield the findings of verification in the connection's transaction."""
    async for finding in verify_database(conn):
        yield finding
    for room_id in await conn.fetchvals("SELECT room_id FROM rooms ORDER BY room_id"):
        async for finding in verify_room(conn, room_id, server_name=server_name):
            yield finding
