"""Repair what all rooms share: known names, sequences, and the stream positions of writers.

Rows of derived tables whose room has neither a row nor events are deleted. So are connections of
sliding sync with mistaken rows: their clients begin new ones. Sequences are set past the values in
the tables, and positions up to the facts of each writer. A store that opens also sets the sequences
forward (storage/streams/startup.py). This is for a running store.
"""

from collections.abc import Collection
from typing import Final, LiteralString

from storage.database.columns import OWN_ENTRIES
from storage.database.connection import Connection, Database
from storage.database.names import KNOWN_EMPTY_KEYS, KNOWN_TYPES
from storage.database.placeholders import compose
from storage.maintenance.expiry import delete_connections
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.maintenance.verify.graph import (
    SQL_CONNECTIONS,
    SQL_LAGGING_POSITIONS,
    LaggingWriterRow,
    MistakenConnectionRow,
)
from storage.maintenance.verify.visibility import (
    SQL_KNOWN_NAMES,
    SQL_ORPHANS,
    OrphansRow,
    WrongNameRow,
)
from storage.streams.startup import lock_positions, set_sequences_forward

SQL_SET_POSITION: Final[LiteralString] = """
INSERT INTO stream_positions (stream_name, instance_name, stream_id)
VALUES ($1::text, $2::text, $3::bigint)
ON CONFLICT (stream_name, instance_name)
    DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
"""

# a group may have entries of another room; its path says that it was not they that were damaged
SQL_RETURN_GROUPS: Final[LiteralString] = compose(
    """
UPDATE state_groups g
SET room_nid = own.room_nid
FROM (
    SELECT s.state_group, min(e.room_nid) AS room_nid
    FROM state_groups s
    CROSS JOIN LATERAL :own_entries.call(s) AS x
    JOIN events e ON e.event_nid = x.event_nid
    WHERE s.state_group = ANY($1::bigint[])
    GROUP BY s.state_group
    HAVING min(e.room_nid) = max(e.room_nid)
) AS own
WHERE g.state_group = own.state_group
    AND g.room_nid <> own.room_nid
    AND NOT EXISTS (
        SELECT
        FROM state_path(g.state_group) AS step
        LEFT JOIN state_groups p ON p.state_group = step.part
        WHERE step.part <> g.state_group AND p.room_nid IS DISTINCT FROM own.room_nid
    )
RETURNING g.state_group
""",
    OWN_ENTRIES,
).sql

SQL_GROUPS_OF: Final[LiteralString] = """
SELECT state_group
FROM state_groups
WHERE room_nid = ANY($1::int[])
"""

SQL_DELETE_ORPHANS: Final[LiteralString] = """
WITH
lost AS MATERIALIZED (
    SELECT n.room_nid
    FROM unnest($1::int[]) AS n (room_nid)
    WHERE NOT EXISTS (SELECT FROM rooms r WHERE r.room_nid = n.room_nid)
        AND NOT EXISTS (SELECT FROM events e WHERE e.room_nid = n.room_nid AND NOT e.outlier)
        AND NOT EXISTS (SELECT FROM events e WHERE e.room_nid = n.room_nid AND e.outlier)
),
gap AS (DELETE FROM missing_events WHERE room_nid IN (SELECT room_nid FROM lost)),
dropped AS (DELETE FROM dropped_extremities WHERE room_nid IN (SELECT room_nid FROM lost)),
waiting AS (DELETE FROM waiting_redactions WHERE room_nid IN (SELECT room_nid FROM lost)),
moved AS (DELETE FROM reordered_events WHERE room_nid IN (SELECT room_nid FROM lost)),
state AS (DELETE FROM state_groups WHERE room_nid IN (SELECT room_nid FROM lost)),
entry AS (DELETE FROM current_state WHERE room_nid IN (SELECT room_nid FROM lost)),
delta AS (DELETE FROM state_deltas WHERE room_nid IN (SELECT room_nid FROM lost)),
member AS (DELETE FROM memberships WHERE room_nid IN (SELECT room_nid FROM lost)),
out_of_band AS (DELETE FROM out_of_band_memberships WHERE room_nid IN (SELECT room_nid FROM lost)),
visible AS (DELETE FROM visibility WHERE room_nid IN (SELECT room_nid FROM lost)),
past AS (DELETE FROM past_visibility WHERE room_nid IN (SELECT room_nid FROM lost)),
number AS (DELETE FROM audiences WHERE room_nid IN (SELECT room_nid FROM lost)),
request AS (DELETE FROM local_transactions WHERE room_nid IN (SELECT room_nid FROM lost))
DELETE FROM partial_rooms
WHERE room_nid IN (SELECT room_nid FROM lost)
"""

# another row that has such a name is of no use: each writer knows the number
SQL_FREE_NAMES: Final[LiteralString] = """
WITH
type AS (
    UPDATE event_types t
    SET type = 'instead of ' || t.type_nid || ': ' || t.type
    FROM unnest($1::int[], $2::text[]) AS k (nid, name)
    WHERE t.type = k.name AND t.type_nid <> k.nid
),
key AS (
    UPDATE state_keys s
    SET state_key = 'instead of ' || s.state_key_nid
    WHERE s.state_key = '' AND s.type_nid = ANY($3::int[]) AND s.state_key_nid <> s.type_nid
)
UPDATE principals p
SET name = 'instead of ' || p.principal_nid || ': ' || p.name
FROM (VALUES (1, '*everybody'), (2, '*shared')) AS k (nid, name)
WHERE p.name = k.name AND p.principal_nid <> k.nid
"""

SQL_SET_NAMES: Final[LiteralString] = """
WITH
type AS (
    INSERT INTO event_types AS t (type_nid, type)
    SELECT k.nid, k.name
    FROM unnest($1::int[], $2::text[]) AS k (nid, name)
    ON CONFLICT (type_nid) DO UPDATE SET type = EXCLUDED.type
        WHERE t.type <> EXCLUDED.type
),
key AS (
    INSERT INTO state_keys AS s (state_key_nid, type_nid, state_key)
    SELECT k.nid, k.nid, ''
    FROM unnest($3::int[]) AS k (nid)
    ON CONFLICT (state_key_nid)
        DO UPDATE SET type_nid = EXCLUDED.type_nid, state_key = EXCLUDED.state_key
        WHERE (s.type_nid, s.state_key) <> (EXCLUDED.type_nid, EXCLUDED.state_key)
)
INSERT INTO principals AS p (principal_nid, name)
VALUES (1, '*everybody'), (2, '*shared')
ON CONFLICT (principal_nid) DO UPDATE SET name = EXCLUDED.name
    WHERE p.name <> EXCLUDED.name
"""


async def repair_positions(database: Database, *, indexes_compared: bool = False) -> None:
    """Set sequences and positions forward, in one transaction that blocks writers.

    Set the names whose numbers the code knows. Delete derived rows of rooms that do not exist, and
    connections with mistaken rows.

    Facts of an unknown writer stay as they are. ``indexes_compared``: the caller has called
    `refuse_corrupt_indexes`. Raise `StorageCorrupt` if an index is corrupt; nothing has changed
    then.
    """

    async def work(conn: Connection) -> None:
        await lock_positions(conn)
        await _set_names(conn)
        await _delete_orphans(conn)
        for row in await conn.fetch(SQL_LAGGING_POSITIONS, row=LaggingWriterRow):
            if row.instance_name is not None:
                await conn.execute(SQL_SET_POSITION, row.stream_name, row.instance_name, row.latest)
        await set_sequences_forward(conn)
        mistaken = await conn.fetch(SQL_CONNECTIONS, row=MistakenConnectionRow)
        await delete_connections(conn, [row.connection_nid for row in mistaken])

    if not indexes_compared:
        await refuse_corrupt_indexes(database, "a repair")
    await database.run(work)


async def return_groups(conn: Connection, state_groups: Collection[int]) -> None:
    """Give state groups back to the room that their entries are of, where their paths are, too.

    A room that still uses them may have them as the only copy of a state that no event gives.
    """
    while state_groups and await conn.fetchvals(SQL_RETURN_GROUPS, list(state_groups)):
        pass  # those that continue a group go back after it


async def _delete_orphans(conn: Connection) -> None:
    rows = await conn.fetch(SQL_ORPHANS, row=OrphansRow)
    lost = sorted({row.room_nid for row in rows if not row.has_events})
    if lost:
        await return_groups(conn, await conn.fetchvals(SQL_GROUPS_OF, lost))
        await conn.execute(SQL_DELETE_ORPHANS, lost)


async def _set_names(conn: Connection) -> None:
    numbers, types, keys = list(KNOWN_TYPES.values()), list(KNOWN_TYPES), list(KNOWN_EMPTY_KEYS)
    if await conn.fetch(SQL_KNOWN_NAMES, numbers, types, keys, row=WrongNameRow):
        for statement in (SQL_FREE_NAMES, SQL_SET_NAMES):
            await conn.execute(statement, numbers, types, keys)
