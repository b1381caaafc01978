"""Count the store's contents and measure its size on disk: counts, tables, the largest states.

The counts are exact and read whole tables: open the database with a long `statement_timeout_ms`.
Sizes are those that Postgres reports.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection

SQL_COUNTS: Final[LiteralString] = """
SELECT
    (SELECT count(*) FROM rooms) AS rooms,
    count(*) AS events,
    count(*) FILTER (WHERE e.state_key_nid IS NOT NULL) AS state_events,
    count(*) FILTER (WHERE e.outlier) AS outliers,
    count(*) FILTER (WHERE e.rejected IS NOT NULL) AS rejected,
    count(*) FILTER (WHERE e.soft_failed) AS soft_failed,
    count(*) FILTER (WHERE e.redacted_by IS NOT NULL OR e.redacted_form) AS redacted,
    (SELECT count(*) FROM missing_events) AS missing_events,
    (SELECT count(*) FROM state_groups) AS state_groups,
    COALESCE(sum(octet_length(e.json)), 0)::bigint AS json_bytes,
    pg_database_size(current_database()) AS database_bytes
FROM events e
"""

SQL_DATABASE: Final[LiteralString] = "SELECT pg_database_size(current_database())"

SQL_TABLES: Final[LiteralString] = """
SELECT
    c.relname::text AS table_name,
    GREATEST(c.reltuples, 0)::bigint AS rows_estimate,
    pg_table_size(c.oid) - COALESCE(pg_total_relation_size(NULLIF(c.reltoastrelid, 0)),
        0) AS table_bytes,
    COALESCE(pg_total_relation_size(NULLIF(c.reltoastrelid, 0)), 0)::bigint AS toast_bytes,
    pg_indexes_size(c.oid) AS index_bytes,
    pg_total_relation_size(c.oid) AS total_bytes
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname = current_schema()
ORDER BY pg_total_relation_size(c.oid) DESC, c.relname
"""

SQL_LARGEST_STATES: Final[LiteralString] = """
SELECT
    r.room_id,
    r.room_version,
    g.entry_count AS state_entries,
    (SELECT count(*) FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = 5) AS joined,
    (SELECT count(*) FROM state_groups s WHERE s.room_nid = r.room_nid) AS state_groups
FROM rooms r
JOIN state_groups g ON g.state_group = r.current_state_group
ORDER BY g.entry_count DESC, r.room_id
LIMIT $1::bigint
"""


class StoreCounts(NamedTuple):
    """The contents of the store.

    ``json_bytes`` are the bytes of events alone, as they are stored; ``database_bytes`` everything
    on disk.
    """

    rooms: int
    events: int
    state_events: int
    outliers: int
    rejected: int
    soft_failed: int
    redacted: int
    missing_events: int
    state_groups: int
    json_bytes: int
    database_bytes: int


class TableSize(NamedTuple):
    """One table on disk, in bytes.

    ``rows_estimate`` is Postgres' last estimate; 0 before the first.
    """

    table_name: str
    rows_estimate: int
    table_bytes: int
    toast_bytes: int
    index_bytes: int
    total_bytes: int


class LargeState(NamedTuple):
    """A room with its current state.

    ``joined`` counts users of all servers, ``state_groups`` all stored states of the room.
    """

    room_id: str
    room_version: str
    state_entries: int
    joined: int
    state_groups: int


async def counts(conn: Connection) -> StoreCounts:
    """Count rooms, events, state groups and bytes."""
    row = await conn.fetchrow(SQL_COUNTS, row=StoreCounts)
    assert row is not None, "an aggregate has a row"  # noqa: S101  # for the types
    return row


async def database_bytes(conn: Connection) -> int:
    return int(await conn.fetchval(SQL_DATABASE))


async def table_sizes(conn: Connection) -> list[TableSize]:
    """Return every table, the largest first."""
    return await conn.fetch(SQL_TABLES, row=TableSize)


async def largest_states(conn: Connection, limit: int = 10) -> list[LargeState]:
    """Return the rooms whose current states have most entries."""
    return await conn.fetch(SQL_LARGEST_STATES, limit, row=LargeState)
