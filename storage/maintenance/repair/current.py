"""Rebuild the current state: resolve its group again, and rewrite the tables that repeat it."""

from collections.abc import Sequence
from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.database.placeholders import transposed
from storage.errors import StorageCorrupt
from storage.maintenance.repair.replay import RepairPlanner
from storage.maintenance.room_states import RoomStates
from storage.maintenance.verify.current import (
    SQL_MEMBER_POSITIONS,
    SQL_STREAM_CUT,
    MemberPositionRow,
    check_deltas,
    strange_deltas,
)
from storage.maintenance.verify.event_loader import VerifiedRoom
from storage.persist.model.event_changes import EventChanges
from storage.persist.plan.partial_state import keeping_the_join
from storage.persist.plan.state_resolution import merged_state
from storage.state.groups import Group, derive
from storage.streams.invalidate_caches import INSTANCE_NAME
from storage.visibility.multirange import NOTHING

SQL_EMPTY_GROUP: Final[LiteralString] = """
SELECT state_group
FROM state_groups
WHERE room_nid = $1::int AND entry_count = 0
ORDER BY state_group
LIMIT 1
"""

SQL_AFTER: Final[LiteralString] = """
SELECT COALESCE(state_group_after, state_group_before)
FROM events
WHERE event_nid = ANY($1::bigint[])
ORDER BY 1
"""

SQL_SET_CURRENT: Final[LiteralString] = """
UPDATE rooms
SET current_state_group = $2::bigint
WHERE room_nid = $1::int
"""

SQL_REPAIR_CURRENT_STATE: Final[LiteralString] = """
WITH
wanted AS (
    SELECT s.state_key_nid, s.event_nid, e.membership
    FROM rooms r
    CROSS JOIN state_entries(r.current_state_group) AS s
    JOIN events e USING (event_nid)
    WHERE r.room_nid = $1::int
),
gone AS (
    DELETE FROM current_state c
    WHERE c.room_nid = $1::int
        AND NOT EXISTS (SELECT FROM wanted w WHERE w.state_key_nid = c.state_key_nid)
)
INSERT INTO current_state (room_nid, state_key_nid, event_nid, membership)
SELECT $1::int, state_key_nid, event_nid, membership
FROM wanted
ON CONFLICT (room_nid, state_key_nid) DO UPDATE SET event_nid = EXCLUDED.event_nid,
    membership = EXCLUDED.membership
    WHERE (current_state.event_nid, current_state.membership)
        IS DISTINCT FROM (EXCLUDED.event_nid, EXCLUDED.membership)
"""

SQL_REPAIR_COUNTS: Final[LiteralString] = """
UPDATE rooms r
SET joined_count = (SELECT count(*) FROM current_state c
    WHERE c.room_nid = r.room_nid AND c.membership = 5),
    invited_count = (SELECT count(*) FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = 4)
WHERE r.room_nid = $1::int
"""

SQL_REPAIR_MEMBERSHIPS: Final[LiteralString] = """
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
    WHERE c.room_nid = $1::int AND k.type_nid = 2
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
    WHERE m.room_nid = $1::int AND m.membership <> 5
        AND NOT EXISTS (SELECT FROM wanted w WHERE w.membership = 5)
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
"""


SQL_SET_MEMBER_POSITIONS: Final[LiteralString] = """
UPDATE memberships m
SET stream_ordering = d.stream_ordering,
    writer_nid = d.writer_nid
FROM unnest($2::text[]) AS i (user_id)
JOIN principals p ON p.name = i.user_id
JOIN state_keys k ON k.type_nid = 2 AND k.state_key = i.user_id
CROSS JOIN LATERAL (
    SELECT stream_ordering, writer_nid
    FROM state_deltas
    WHERE room_nid = $1::int AND state_key_nid = k.state_key_nid
    ORDER BY stream_ordering DESC
    LIMIT 1
) AS d
WHERE m.room_nid = $1::int AND m.principal_nid = p.principal_nid
"""

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


async def repair_current(
    conn: Connection, planner: RepairPlanner, states: RoomStates, ends: Sequence[int]
) -> None:
    """Set the state group of the current state by resolving the states after these extremities.

    In a partial room the join is kept (`keeping_the_join`).
    Without extremities it is the empty state. Clients get no state change for it: they see it in
    their next initial sync.
    """
    room_nid = planner.row.room_nid
    numbers: list[int] = await conn.fetchvals(SQL_AFTER, list(ends))
    if not numbers:
        await conn.execute(
            SQL_SET_CURRENT, room_nid, await conn.fetchval(SQL_EMPTY_GROUP, room_nid)
        )
        return
    loaded = await states.load(conn, numbers)
    lost = [number for number in numbers if number not in loaded]
    if lost:
        raise StorageCorrupt(
            "the states after forward extremities cannot be read",
            room_nid=room_nid,
            state_groups=lost,
        )
    groups = [loaded[number] for number in dict.fromkeys(numbers)]

    def work(changes: EventChanges) -> Group:
        return merged_state(
            changes,
            [*keeping_the_join(changes, groups)],
            lambda base, change: changes.add_group(
                derive(
                    base, change, changes.change_set.blocks.take("state_group_nids"), NOTHING
                )._replace(is_sought=True)
            ),
        )

    merged = await planner.plan(conn, work)
    await planner.write_groups(conn)
    await conn.execute(SQL_SET_CURRENT, room_nid, merged.state_group)


async def repair_state_tables(conn: Connection, room_nid: int, server_name: str) -> None:
    """Rewrite the current state by key, and the memberships of local users.

    Delete transactions that do not name an event of their user.
    """
    await conn.execute(SQL_SET_PARTIAL, room_nid)
    await repair_entries(conn, room_nid)
    await conn.execute(SQL_REPAIR_MEMBERSHIPS, room_nid, server_name)
    await conn.execute(SQL_DELETE_MISTAKEN, room_nid)


async def repair_entries(conn: Connection, room_nid: int) -> None:
    """Rewrite the current state by key, and the numbers of members."""
    await conn.execute(SQL_REPAIR_CURRENT_STATE, room_nid)
    await conn.execute(SQL_REPAIR_COUNTS, room_nid)


async def repair_member_positions(conn: Connection, room_nid: int) -> None:
    """Set the positions of memberships by the changes of the current state, repaired before."""
    rows = await conn.fetch(SQL_MEMBER_POSITIONS, room_nid, row=MemberPositionRow)
    await conn.execute(SQL_SET_MEMBER_POSITIONS, room_nid, [row.user_id for row in rows])


# --------------------------------------------------------------------------------------------------
# Repair `state_deltas`: make its chains whole, and publish what they lack at a new position.
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
