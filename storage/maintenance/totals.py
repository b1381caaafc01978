"""Count the contents of the store: cheap totals for the progress of a job, and exact counts.

`counts` and `largest_states` read whole tables: open the database with a long
`statement_timeout_ms`.
"""

from collections.abc import Collection
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.placeholders import fill

SQL_ESTIMATE: Final[LiteralString] = """
SELECT (c.reltuples / c.relpages * pg_relation_size(c.oid)
    / current_setting('block_size')::bigint)::bigint
FROM pg_class c
WHERE c.oid = to_regclass('events') AND c.reltuples > 0 AND c.relpages > 0
"""

SQL_EVENTS: Final[LiteralString] = """
SELECT count(*)
FROM events
"""

SQL_EVENTS_OF_ROOMS: Final[LiteralString] = """
SELECT count(*)
FROM rooms r
JOIN events e USING (room_nid)
WHERE r.room_id = ANY($1::text[])
"""

SQL_ROOMS: Final[LiteralString] = """
SELECT count(*)
FROM rooms
"""

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

SQL_LARGEST_STATES: Final[LiteralString] = fill("""
SELECT
    r.room_id,
    r.room_version,
    g.entry_count AS state_entries,
    (SELECT count(*) FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = {JOIN}) AS joined,
    (SELECT count(*) FROM state_groups s WHERE s.room_nid = r.room_nid) AS state_groups
FROM rooms r
JOIN state_groups g ON g.state_group = r.current_state_group
ORDER BY g.entry_count DESC, r.room_id
LIMIT $1::bigint
""")


class Total(NamedTuple):
    """A number of rows, exact or estimated."""

    rows: int
    is_estimate: bool


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


class LargeState(NamedTuple):
    """A room with its current state.

    ``joined`` counts users of all servers, ``state_groups`` all stored states of the room.
    """

    room_id: str
    room_version: str
    state_entries: int
    joined: int
    state_groups: int


async def event_total(conn: Connection, room_ids: Collection[str] | None = None) -> Total:
    """Return the number of events of these rooms, or about how many there are in all.

    The estimate is that of the last ANALYZE or VACUUM, scaled by the size of the table now. Without
    one the table is new, and is counted.
    """
    if room_ids is not None:
        return Total(await conn.fetchval(SQL_EVENTS_OF_ROOMS, list(room_ids)), is_estimate=False)
    estimate: int | None = await conn.fetchval(SQL_ESTIMATE)
    if estimate is not None:
        return Total(estimate, is_estimate=True)
    return Total(await conn.fetchval(SQL_EVENTS), is_estimate=False)


async def room_total(conn: Connection) -> int:
    return int(await conn.fetchval(SQL_ROOMS))


async def counts(conn: Connection) -> StoreCounts:
    """Count rooms, events, state groups and bytes."""
    row = await conn.fetchrow(SQL_COUNTS, row=StoreCounts)
    assert row is not None, "an aggregate has a row"  # noqa: S101  # for the types
    return row


async def largest_states(conn: Connection, limit: int = 10) -> list[LargeState]:
    """Return the rooms whose current states have most entries."""
    return await conn.fetch(SQL_LARGEST_STATES, limit, row=LargeState)
