"""Repair `state_deltas`: make its chains whole, and publish what they lack at a new position.

A lost delta cannot be put back into the past: clients may have tokens from after it. So the chains
get what they have, without gaps. Where they then do not end at the current state, the difference
becomes deltas at a new position, as after the completion of a partial room. Every client gets it
in its next sync.
"""

from typing import Final, LiteralString

from storage.database.array_text import transposed
from storage.database.connection import Connection
from storage.maintenance.verify.deltas import SQL_STREAM_CUT, check_deltas, strange_deltas
from storage.maintenance.verify.room import VerifiedRoom
from storage.streams.invalidate_caches import INSTANCE_NAME

SQL_DROP: Final[LiteralString] = """
DELETE FROM state_deltas d
USING unnest($2::bigint[], $3::int[]) AS i (stream_ordering, state_key_nid)
WHERE d.room_nid = $1::int AND d.stream_ordering = i.stream_ordering
    AND d.state_key_nid = i.state_key_nid
"""

SQL_SET_WRITERS: Final[LiteralString] = """
UPDATE state_deltas d
SET writer_nid = e.writer_nid
FROM events e
WHERE d.room_nid = $1::int AND e.stream_ordering = d.stream_ordering AND e.room_nid = d.room_nid
    AND d.writer_nid <> e.writer_nid
"""

SQL_JOIN_CHAINS: Final[LiteralString] = """
UPDATE state_deltas d
SET prev_event_nid = o.before
FROM (
    SELECT stream_ordering, state_key_nid, prev_event_nid,
        lag(event_nid) OVER chain AS before, row_number() OVER chain > 1 OR NOT $2::boolean AS known
    FROM state_deltas
    WHERE room_nid = $1::int
    WINDOW chain AS (PARTITION BY state_key_nid ORDER BY stream_ordering)
) AS o
WHERE d.room_nid = $1::int AND d.stream_ordering = o.stream_ordering
    AND d.state_key_nid = o.state_key_nid AND o.known AND d.prev_event_nid IS DISTINCT FROM o.before
"""

SQL_DROP_UNCHANGED: Final[LiteralString] = """
DELETE FROM state_deltas
WHERE room_nid = $1::int AND event_nid IS NOT DISTINCT FROM prev_event_nid
"""

SQL_LOCK_POSITION: Final[LiteralString] = """
SELECT stream_id
FROM stream_positions
WHERE stream_name = 'events' AND instance_name = $1::text
FOR UPDATE  -- keeps others from moving this writer's position past an id not committed yet
"""

SQL_PUBLISH: Final[LiteralString] = """
WITH
fact AS MATERIALIZED (
    SELECT nextval('events_stream') AS stream_id, w.writer_nid
    FROM writers w
    WHERE w.instance_name = $2::text
),
delta AS (
    INSERT INTO state_deltas (stream_ordering, event_nid, prev_event_nid, room_nid, state_key_nid,
        writer_nid)
    SELECT f.stream_id, c.event_nid, o.event_nid, $1::int, state_key_nid, f.writer_nid
    FROM fact f
    CROSS JOIN (
        (SELECT state_key_nid, event_nid FROM current_state WHERE room_nid = $1::int) AS c
        FULL JOIN (
            SELECT DISTINCT ON (state_key_nid) state_key_nid, event_nid
            FROM state_deltas
            WHERE room_nid = $1::int
            ORDER BY state_key_nid, stream_ordering DESC
        ) AS o USING (state_key_nid)
    )
    WHERE c.event_nid IS DISTINCT FROM o.event_nid
        AND (o.state_key_nid IS NOT NULL OR NOT $3::boolean)
    RETURNING state_key_nid
),
member AS (  -- their syncs get the room by this position
    UPDATE memberships m
    SET stream_ordering = f.stream_id,
        writer_nid = f.writer_nid
    FROM fact f
    CROSS JOIN delta d
    JOIN state_keys k USING (state_key_nid)
    JOIN principals p ON p.name = k.state_key
    WHERE m.room_nid = $1::int AND m.principal_nid = p.principal_nid AND k.type_nid = 2
),
published AS (  -- the fact of the stream: it wakes the syncs of the room
    INSERT INTO outlier_memberships (stream_id, event_nid, writer_nid)
    SELECT f.stream_id, c.event_nid, f.writer_nid
    FROM fact f
    CROSS JOIN (
        SELECT event_nid
        FROM current_state
        WHERE room_nid = $1::int AND membership IS NOT NULL
        ORDER BY state_key_nid
        LIMIT 1
    ) AS c
),
room AS (
    UPDATE rooms
    SET last_stream_ordering = fact.stream_id,
        completed_at = fact.stream_id
    FROM fact
    WHERE room_nid = $1::int
)
UPDATE stream_positions p
SET stream_id = GREATEST(p.stream_id, fact.stream_id)
FROM fact
WHERE p.stream_name = 'events' AND p.instance_name = $2::text
"""


async def repair_deltas(conn: Connection, room: VerifiedRoom) -> None:
    """Repair the changes of the current state, which was repaired before, if they are wrong.

    ``room`` is the room as it is now.
    """
    if await anext(check_deltas(conn, room), None) is None:
        return
    cut = await conn.fetchval(SQL_STREAM_CUT, room.nid)
    strange = await strange_deltas(conn, room, cut)
    await conn.execute(SQL_DROP, room.nid, *transposed(strange, 2))
    await conn.execute(SQL_SET_WRITERS, room.nid)
    await conn.execute(SQL_JOIN_CHAINS, room.nid, cut is not None)
    await conn.execute(SQL_DROP_UNCHANGED, room.nid)
    await conn.fetchval(SQL_LOCK_POSITION, INSTANCE_NAME)
    await conn.execute(SQL_PUBLISH, room.nid, INSTANCE_NAME, cut is not None)
