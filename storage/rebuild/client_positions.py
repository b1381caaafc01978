"""Repair what clients know of a room, after its derived tables are right.

Positions of events, and the changes of the current state at them, cannot be planned again: clients
have tokens from before and after them. So they stay, and get only what they lack, at new positions.

  moved events     an event that becomes accepted, with its descendants: new positions, in their
                   old order. Clients get them in their next sync. If clients have one of them
                   already, syncs from before it start from the beginning (`purged_streams`)
  former positions reorderings of nothing are dropped
  times            each late event gets the time that was reached before it
  deltas           their chains are made whole; the difference to the current state is published at
                   one new position
  memberships      of local users, with the position of their last change
"""

from collections.abc import Collection
from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.database.placeholders import fill, transposed
from storage.errors import StorageCorrupt
from storage.maintenance.verify.current import (
    SQL_MEMBER_POSITIONS,
    SQL_STREAM_CUT,
    MemberPositionRow,
    check_deltas,
    strange_deltas,
)
from storage.maintenance.verify.event_loader import VerifiedRoom
from storage.maintenance.verify.graph import (
    SQL_AFTER_GAPS,
    SQL_TIME_ORDER,
    SQL_WRONG_REORDERINGS,
    AfterGapRow,
    TimeOrderRow,
    WrongReorderingRow,
)
from storage.streams.invalidate_caches import INSTANCE_NAME
from storage.streams.stream_writer import Author

# --------------------------------------------------------------------------------------------------
# Give new positions to events that become accepted, and to those that depend on them.
#
#   stream    1 create   2 join   3 levels, rejected   4 message, which cites them   5 another
#   after     1 create   2 join   5 another   6 levels   7 message
#
# A child never comes before its parent in this way, so no event becomes one that arrived after a
# gap. An event that was readmitted has two positions, and gets two new ones.

SQL_AUTHOR: Final[LiteralString] = """
SELECT w.writer_nid, p.instance_name, p.epoch AS writer_epoch
FROM stream_positions p
JOIN writers w USING (instance_name)
WHERE p.instance_name = $1::text AND p.stream_name IN ('events', 'backfill', 'caches')
ORDER BY p.stream_name
FOR UPDATE OF p  -- keeps others from moving this writer's positions past uncommitted ids
"""

SQL_MOVE: Final[LiteralString] = """
WITH
old AS MATERIALIZED (
    SELECT event_nid, stream_ordering, arrival_ordering, backfilled,
        rejected IS NULL AND NOT soft_failed AND NOT backfilled AS is_shown
    FROM events
    WHERE event_nid = ANY($2::bigint[]) AND NOT outlier
),
step AS MATERIALIZED (
    SELECT event_nid, is_arrival, nextval('events_stream') AS position
    FROM (
        SELECT event_nid, stream_ordering AS position, false AS is_arrival FROM old
        UNION ALL
        SELECT event_nid, arrival_ordering, true FROM old WHERE arrival_ordering IS NOT NULL
        ORDER BY position
        OFFSET 0
    ) AS ordered
),
delta AS (
    DELETE FROM state_deltas
    WHERE room_nid = $1::int AND stream_ordering IN (SELECT stream_ordering FROM old)
),
former AS (
    DELETE FROM reordered_events
    WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])
),
purged AS (
    INSERT INTO purged_streams (stream_name, purged_upto)
    SELECT 'events', max(stream_ordering) FROM old WHERE is_shown HAVING count(*) > 0
    ON CONFLICT (stream_name) DO UPDATE SET purged_upto = GREATEST(purged_streams.purged_upto,
        EXCLUDED.purged_upto)
),
set_position AS (
    UPDATE stream_positions p
    SET stream_id = GREATEST(p.stream_id, latest.position)
    FROM (
        SELECT CASE WHEN old.backfilled THEN 'backfill' ELSE 'events' END AS stream_name,
            max(step.position) AS position
        FROM step
        JOIN old USING (event_nid)
        GROUP BY 1
    ) AS latest
    WHERE p.stream_name = latest.stream_name AND p.instance_name = $3::text
)
UPDATE events e
SET stream_ordering = step.position,
    arrival_ordering = arrival.position,
    writer_nid = $4::smallint
FROM step
LEFT JOIN step AS arrival ON arrival.event_nid = step.event_nid AND arrival.is_arrival
WHERE e.event_nid = step.event_nid AND NOT step.is_arrival
"""


async def move(conn: Connection, room_nid: int, event_nids: Collection[int]) -> None:
    """Give these events new positions, in their old order."""
    author = await conn.fetchrow(SQL_AUTHOR, INSTANCE_NAME, row=Author)
    if author is None:
        raise StorageCorrupt("the writer of repairs has no positions", instance_name=INSTANCE_NAME)
    await conn.execute(SQL_MOVE, room_nid, list(event_nids), INSTANCE_NAME, author.writer_nid)


SQL_SET_AFTER_GAPS: Final[LiteralString] = """
UPDATE events e
SET after_gap = NULLIF(i.after_gap, false)
FROM unnest($2::text[], $3::boolean[]) AS i (event_id, after_gap)
WHERE e.event_id = i.event_id AND e.room_nid = $1::int
"""


async def repair_after_gaps(conn: Connection, room_nid: int) -> None:
    """Set the flag of the events that arrived before one of their parents, by their positions."""
    rows = await conn.fetch(SQL_AFTER_GAPS, room_nid, row=AfterGapRow)
    await conn.execute(
        SQL_SET_AFTER_GAPS, room_nid, *transposed(((row[0], row.expected) for row in rows), 2)
    )


# --------------------------------------------------------------------------------------------------
# Former positions of reordered events, and times.

SQL_DROP_MOVES: Final[LiteralString] = """
DELETE FROM reordered_events m
USING unnest($2::bigint[], $3::bigint[]) AS i (moves, event_nid)
WHERE m.room_nid = $1::int AND m.moves = i.moves AND m.event_nid = i.event_nid
"""

SQL_COUNT_MOVES: Final[LiteralString] = """
UPDATE rooms
SET moves = GREATEST(moves,
    (SELECT COALESCE(max(m.moves), 0) FROM reordered_events m WHERE m.room_nid = $1::int))
WHERE room_nid = $1::int
"""

SQL_SET_OUT_OF_ORDER: Final[LiteralString] = """
UPDATE events e
SET in_order_ts = i.in_order_ts
FROM unnest($1::bigint[], $2::bigint[]) AS i (event_nid, in_order_ts)
WHERE e.event_nid = i.event_nid
"""

SQL_SET_REACHED: Final[LiteralString] = """
UPDATE rooms r
SET in_order_ts = reached.in_order_ts
FROM (
    SELECT max(COALESCE(in_order_ts, origin_server_ts)) AS in_order_ts
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled
) AS reached
WHERE r.room_nid = $1::int AND r.in_order_ts < reached.in_order_ts
"""


async def repair_reorderings(conn: Connection, room_nid: int) -> None:
    """Drop impossible reorderings; tokens then use the current positions of these events."""
    while wrong := await conn.fetch(SQL_WRONG_REORDERINGS, room_nid, row=WrongReorderingRow):
        await conn.execute(SQL_DROP_MOVES, room_nid, *transposed((row[:2] for row in wrong), 2))
    await conn.execute(SQL_COUNT_MOVES, room_nid)


async def repair_time_order(conn: Connection, room_nid: int) -> None:
    """Set the time that was reached before it for each event where it is not possible.

    The time reached after it stays what it was, so no other event becomes wrong.
    """
    wrong = await conn.fetch(SQL_TIME_ORDER, room_nid, row=TimeOrderRow)
    await conn.execute(
        SQL_SET_OUT_OF_ORDER, *transposed(((row.event_nid, row.before) for row in wrong), 2)
    )
    await conn.execute(SQL_SET_REACHED, room_nid)


# --------------------------------------------------------------------------------------------------
# Memberships of local users, and transactions.

SQL_REPAIR_MEMBERSHIPS: Final[LiteralString] = fill("""
WITH
wanted AS (  -- local users in the current state, with the position of the last known change
    SELECT p.principal_nid, c.event_nid, COALESCE(c.membership, 0) AS membership,
        COALESCE(d.stream_ordering, e.stream_ordering, r.last_stream_ordering,
            1) AS stream_ordering,
        COALESCE(d.writer_nid, e.writer_nid) AS writer_nid
    FROM current_state c
    JOIN rooms r USING (room_nid)
    JOIN state_keys k USING (state_key_nid)
    JOIN principals p ON p.name = k.state_key
    JOIN events e ON e.event_nid = c.event_nid
    LEFT JOIN LATERAL (
        SELECT stream_ordering, writer_nid
        FROM state_deltas
        WHERE room_nid = c.room_nid AND state_key_nid = c.state_key_nid
        ORDER BY stream_ordering DESC
        LIMIT 1
    ) AS d ON true
    WHERE c.room_nid = $1::int AND k.type_nid = {TYPE_MEMBER}
        AND right(k.state_key, length($2::text) + 1) = ':' || $2::text
),
own AS (  -- rows that may stay: out of band, while no local user is joined
    SELECT m.principal_nid
    FROM memberships m
    JOIN principals p USING (principal_nid)
    JOIN events e ON e.event_nid = m.event_nid AND e.membership = m.membership
        -- an accepted event of the history is not in the current state
        AND (e.outlier OR (e.backfilled AND e.rejected IS NULL AND NOT e.soft_failed))
    JOIN state_keys k ON k.state_key_nid = e.state_key_nid AND k.state_key = p.name
    WHERE m.room_nid = $1::int AND m.membership <> {JOIN}
        AND NOT EXISTS (SELECT FROM wanted w WHERE w.membership = {JOIN})
),
gone AS (
    DELETE FROM memberships m
    WHERE m.room_nid = $1::int
        AND NOT (m.event_nid = 0 AND m.membership = 0)
        AND NOT EXISTS (SELECT FROM wanted w WHERE w.principal_nid = m.principal_nid)
        AND NOT EXISTS (SELECT FROM own o WHERE o.principal_nid = m.principal_nid)
)
INSERT INTO memberships (principal_nid, room_nid, membership, event_nid, stream_ordering,
    writer_nid)
SELECT principal_nid, $1::int, membership, event_nid, stream_ordering, writer_nid
FROM wanted w
WHERE NOT EXISTS (SELECT FROM own o WHERE o.principal_nid = w.principal_nid)
ON CONFLICT (principal_nid, room_nid) DO UPDATE
    SET membership = EXCLUDED.membership, event_nid = EXCLUDED.event_nid
    WHERE (memberships.membership, memberships.event_nid) <> (EXCLUDED.membership,
        EXCLUDED.event_nid)
""")

SQL_SET_MEMBER_POSITIONS: Final[LiteralString] = fill("""
UPDATE memberships m
SET stream_ordering = d.stream_ordering,
    writer_nid = d.writer_nid
FROM unnest($2::text[]) AS i (user_id)
JOIN principals p ON p.name = i.user_id
JOIN state_keys k ON k.type_nid = {TYPE_MEMBER} AND k.state_key = i.user_id
CROSS JOIN LATERAL (
    SELECT stream_ordering, writer_nid
    FROM state_deltas
    WHERE room_nid = $1::int AND state_key_nid = k.state_key_nid
    ORDER BY stream_ordering DESC
    LIMIT 1
) AS d
WHERE m.room_nid = $1::int AND m.principal_nid = p.principal_nid
""")

SQL_SET_PARTIAL: Final[LiteralString] = """
UPDATE rooms r
SET is_partial = false
WHERE r.room_nid = $1::int AND r.is_partial
    AND NOT EXISTS (SELECT FROM partial_rooms p WHERE p.room_nid = r.room_nid)
"""

SQL_DELETE_MISTAKEN: Final[LiteralString] = """
DELETE FROM local_transactions t
USING events e
WHERE t.room_nid = $1::int AND e.event_nid = t.event_nid
    AND (e.event_id <> t.event_id OR e.room_nid <> t.room_nid OR e.sender_nid <> t.sender_nid)
"""


async def repair_memberships(conn: Connection, room_nid: int, server_name: str) -> None:
    """Rewrite the memberships of local users, by the current state.

    Delete transactions that do not name an event of their user.
    """
    await conn.execute(SQL_SET_PARTIAL, room_nid)
    await conn.execute(SQL_REPAIR_MEMBERSHIPS, room_nid, server_name)
    await conn.execute(SQL_DELETE_MISTAKEN, room_nid)


async def repair_member_positions(conn: Connection, room_nid: int) -> None:
    """Set the positions of memberships by the changes of the current state, repaired before."""
    rows = await conn.fetch(SQL_MEMBER_POSITIONS, room_nid, row=MemberPositionRow)
    await conn.execute(SQL_SET_MEMBER_POSITIONS, room_nid, [row.user_id for row in rows])


# --------------------------------------------------------------------------------------------------
# Make the chains of `state_deltas` whole, and publish what they lack at a new position.
#
# A lost delta cannot be put back into the past: clients may have tokens from after it. So the
# chains get what they have, without gaps. Where they then do not end at the current state, the
# difference becomes deltas at a new position, as after the completion of a partial room. Every
# client gets it in its next sync.

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

SQL_PUBLISH: Final[LiteralString] = fill("""
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
    WHERE m.room_nid = $1::int AND m.principal_nid = p.principal_nid
        AND k.type_nid = {TYPE_MEMBER}
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
""")


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
