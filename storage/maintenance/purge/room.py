"""Purge a whole room: hide it from everybody first, then delete its rows in batches.

The first transaction takes the room from its users. It removes memberships, current state, forward
extremities and visibility, as for a room that is known by outliers only. The later transactions
need none of these. A writer that writes to the room meanwhile loses its events, so each transaction
removes these again. Each also counts as a deletion (`rooms.removals`), which a writer compares
before it answers from its caches. The row of the room is deleted last, when no event is left.
Interned names stay, and the nids of other rooms never change.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection, Database
from storage.database.placeholders import fill
from storage.errors import PurgeRefused, UnknownRoom
from storage.ids import RoomId
from storage.maintenance.purge.history import PurgeContext
from storage.maintenance.purge.job import PurgeJob, count
from storage.persist.room_lock import lock_room
from storage.streams.caches import AUTH_CHAIN_IDS, CURRENT_STATE
from storage.streams.invalidate_caches import invalidate_caches, register_writer

SQL_JOINED: Final[LiteralString] = fill("""
SELECT p.name
FROM current_state c
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = c.state_key_nid OFFSET 0
) AS k
CROSS JOIN LATERAL (
    SELECT principal_nid, name FROM principals WHERE name = k.state_key OFFSET 0
) AS p
CROSS JOIN LATERAL (
    SELECT membership FROM memberships
    WHERE principal_nid = p.principal_nid AND room_nid = c.room_nid
    OFFSET 0
) AS m
WHERE c.room_nid = $1::int AND c.membership = {JOIN} AND m.membership = {JOIN}
ORDER BY p.name
LIMIT 1
""")

SQL_HIDE: Final[LiteralString] = fill("""
WITH
member AS (DELETE FROM memberships WHERE room_nid = $1::int),
out_of_band AS (DELETE FROM out_of_band_memberships WHERE room_nid = $1::int),
sight AS (DELETE FROM visibility WHERE room_nid = $1::int),
past AS (DELETE FROM past_visibility WHERE room_nid = $1::int),
state AS (DELETE FROM current_state WHERE room_nid = $1::int),
receipt AS (DELETE FROM receipts WHERE room_nid = $1::int),
account AS (DELETE FROM account_data WHERE room_nid = $1::int),
sent AS (DELETE FROM sliding_rooms WHERE room_nid = $1::int),
partial AS (DELETE FROM partial_rooms WHERE room_nid = $1::int),
fact AS (
    DELETE FROM published_facts
    WHERE key = (SELECT room_id FROM rooms WHERE room_nid = $1::int)
),
-- up to where local users came and went; users who are still joined (with --force) sync from the
-- beginning wherever they are
purged AS (
    INSERT INTO purged_streams (stream_name, purged_upto)
    SELECT 'events', GREATEST(max(m.stream_ordering),
        max(r.last_stream_ordering) FILTER (WHERE m.membership >= {KNOCK}))
    FROM rooms r
    JOIN memberships m USING (room_nid)
    WHERE r.room_nid = $1::int
    HAVING count(*) > 0
    ON CONFLICT (stream_name) DO UPDATE SET purged_upto = GREATEST(purged_streams.purged_upto,
        EXCLUDED.purged_upto)
)
UPDATE rooms
SET forward_extremities = '{}',
    current_state_group = NULL,
    last_stream_ordering = NULL,
    current_audience = 0,
    is_partial = false,
    completed_at = NULL,
    joined_count = 0,
    invited_count = 0,
    out_of_range = '{}',
    removals = removals + 1
WHERE room_nid = $1::int
""")

SQL_EVENTS: Final[LiteralString] = """
WITH
gone AS (
    DELETE FROM events
    WHERE event_nid = ANY(ARRAY(
        SELECT event_nid
        FROM (
            (SELECT event_nid FROM events WHERE room_nid = $1::int AND NOT outlier LIMIT $2::bigint)
            UNION ALL
            (SELECT event_nid FROM events WHERE room_nid = $1::int AND outlier LIMIT $2::bigint)
        ) AS e
        LIMIT $2::bigint
    ))
    RETURNING event_nid
),
place AS (
    DELETE FROM auth_chains
    WHERE event_nid = ANY(ARRAY(SELECT event_nid FROM gone))
    RETURNING COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number
),
link AS (
    DELETE FROM auth_chain_links l
    USING place
    WHERE l.chain_nid = place.chain_nid AND l.sequence_number = place.sequence_number
),
invitation AS (
    DELETE FROM outlier_memberships
    WHERE event_nid = ANY(ARRAY(SELECT event_nid FROM gone))
)
SELECT count(*)
FROM gone
"""

SQL_GROUPS: Final[LiteralString] = """
WITH gone AS (
    DELETE FROM state_groups
    WHERE state_group = ANY(ARRAY(SELECT state_group FROM state_groups WHERE room_nid = $1::int
        LIMIT $2::bigint))
    RETURNING state_group
)
SELECT count(*)
FROM gone
"""

SQL_REST: Final[LiteralString] = """
WITH
delta AS (
    DELETE FROM state_deltas
    WHERE (room_nid, stream_ordering, state_key_nid) IN (
        SELECT room_nid, stream_ordering, state_key_nid FROM state_deltas WHERE room_nid = $1::int
            LIMIT $2::bigint
    )
    RETURNING 1
),
number AS (
    DELETE FROM audiences
    WHERE (room_nid, audience) IN (SELECT room_nid, audience FROM audiences WHERE room_nid = $1::int
        LIMIT $2::bigint)
    RETURNING 1
),
moved AS (
    DELETE FROM reordered_events
    WHERE (room_nid, moves, event_nid) IN (SELECT room_nid, moves, event_nid FROM reordered_events
        WHERE room_nid = $1::int LIMIT $2::bigint)
    RETURNING 1
),
gap AS (
    DELETE FROM missing_events
    WHERE event_nid = ANY(ARRAY(SELECT event_nid FROM missing_events WHERE room_nid = $1::int
        LIMIT $2::bigint))
    RETURNING 1
),
leaving AS (
    DELETE FROM purge_retained_events
    WHERE (room_nid, event_nid) IN (SELECT room_nid, event_nid FROM purge_retained_events
        WHERE room_nid = $1::int LIMIT $2::bigint)
    RETURNING 1
),
request AS (
    DELETE FROM local_transactions
    WHERE event_nid = ANY(ARRAY(SELECT event_nid FROM local_transactions WHERE room_nid = $1::int
        LIMIT $2::bigint))
    RETURNING 1
)
SELECT (SELECT count(*) FROM delta) + (SELECT count(*) FROM number) + (SELECT count(*)
    FROM moved) + (SELECT count(*) FROM gap)
    + (SELECT count(*) FROM leaving) + (SELECT count(*) FROM request)
"""

SQL_LAST: Final[LiteralString] = """
WITH
waiting AS (DELETE FROM waiting_redactions WHERE room_nid = $1::int),
dropped AS (DELETE FROM dropped_extremities WHERE room_nid = $1::int),
member AS (DELETE FROM memberships WHERE room_nid = $1::int),
out_of_band AS (DELETE FROM out_of_band_memberships WHERE room_nid = $1::int),
sight AS (DELETE FROM visibility WHERE room_nid = $1::int),
past AS (DELETE FROM past_visibility WHERE room_nid = $1::int),
state AS (DELETE FROM current_state WHERE room_nid = $1::int),
receipt AS (DELETE FROM receipts WHERE room_nid = $1::int),
account AS (DELETE FROM account_data WHERE room_nid = $1::int),
request AS (DELETE FROM local_transactions WHERE room_nid = $1::int),
fact AS (
    DELETE FROM published_facts
    WHERE key = (SELECT room_id FROM rooms WHERE room_nid = $1::int)
)
DELETE FROM rooms
WHERE room_nid = $1::int
"""


async def refuse_joined(conn: Connection, room_id: str, room_nid: int) -> None:
    """Raise `PurgeRefused` while a local user is joined."""
    joined = await conn.fetchval(SQL_JOINED, room_nid)
    if joined is not None:
        raise PurgeRefused(
            f"{joined} is joined: let local users leave first, or force it (--force)",
            room_id=room_id,
        )


async def hide(conn: Connection, room_nid: int) -> None:
    """Do the job's first transaction, with the room locked; call `register_writer` before it."""
    await conn.execute(SQL_HIDE, room_nid)
    await invalidate_caches(conn, CURRENT_STATE)


async def purge_tables(context: PurgeContext, job: PurgeJob) -> PurgeJob:
    """Delete everything else, and the room itself last."""
    while job.phase != "done":
        with context.pace.measured():
            job = await _take(context, job)
        await context.pace.rest(job)
    return job


async def _take(context: PurgeContext, job: PurgeJob) -> PurgeJob:
    room_nid, batch = job.room_nid, context.pace.batch

    async def work(conn: Connection) -> PurgeJob:
        await lock_room(conn, job.room_id)
        context.pace.locked()
        await conn.execute(SQL_HIDE, room_nid)
        if events := int(await conn.fetchval(SQL_EVENTS, room_nid, batch)):
            await invalidate_caches(conn, AUTH_CHAIN_IDS)
            return await count(conn, job, deleted=events, phase="room")
        groups = int(await conn.fetchval(SQL_GROUPS, room_nid, batch))
        if groups + int(await conn.fetchval(SQL_REST, room_nid, batch)):
            return await count(conn, job, state_groups=groups, phase="room")
        await conn.execute(SQL_LAST, room_nid)
        done = await count(conn, job, phase="done")
        await invalidate_caches(conn, CURRENT_STATE)
        await invalidate_caches(conn, "events")
        return done

    return await context.database.run(work)


# --------------------------------------------------------------------------------------------------
# Forget a room that is known by out-of-band memberships only, such as invites over federation.
#
# Its version is then a claim of the servers that sent them, and one of them may lie. It must not
# keep this server out of the room. The memberships go with it: their ids depend on the version.

SQL_IS_CLAIMED: Final[LiteralString] = """
SELECT NOT EXISTS (
    SELECT
    FROM events e
    WHERE e.room_nid = r.room_nid AND NOT is_out_of_band(e)
)
FROM rooms r
WHERE r.room_id = $1::text AND r.current_state_group IS NULL
"""

ALL: Final = 1 << 62


async def is_claimed(conn: Connection, room_id: RoomId) -> bool:
    """Return whether all events of a room are out of band. An unknown room has none."""
    return await conn.fetchval(SQL_IS_CLAIMED, room_id) is True


async def forget_claimed_room(database: Database, room_id: RoomId) -> bool:
    """Delete a room of which all events are out of band; return whether it is unknown now.

    It needs the rights of a purge, and is one transaction: such a room has few events.
    """
    await register_writer(database)
    try:
        async with database.transaction() as conn:
            room_nid = await lock_room(conn, room_id)
            if not await is_claimed(conn, room_id):
                return False
            await hide(conn, room_nid)
            await conn.execute(SQL_EVENTS, room_nid, ALL)
            await conn.execute(SQL_LAST, room_nid)
            await invalidate_caches(conn, CURRENT_STATE)
            await invalidate_caches(conn, "events")
    except UnknownRoom:  # another process has deleted it
        return True
    return True
