"""State groups that nothing refers to any more: left by merges that were overtaken, by purged events, by repairs.

A group is needed if it is the state before or after an event, a room's current state, or on the path of a group that is needed; the
empty state of a room is always kept. Whether a group is needed is looked up in a snapshot, without holding anybody up. Then a
bounded number is deleted at a time, with the room held (`storage.maintenance.room_lock`), after a second look at what came since: new
events have larger stream orderings, as positions are taken under the same lock. The plans of writers that had such a group in their caches
and were about to refer to it are refused (storage/persist/write/dependencies.py); one row a batch tells them what to forget.

An index that misses rows would make groups that are in use look like garbage. So the indexes are compared with their tables first.

Groups are deleted from the ends of paths inwards, so that what is left between two batches can be read at any time.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.maintenance.indexes import prove_indexes
from storage.maintenance.invalidate_caches import publish_removed, register_writer
from storage.maintenance.room_lock import lock_room_keeping_plans
from storage.maintenance.verify.run import all_rooms
from storage.maintenance.xmin_horizon import xmin_horizon

SQL_GARBAGE: Final[LiteralString] = """
WITH
room AS (
    SELECT room_nid, current_state_group
    FROM rooms
    WHERE room_id = $1::text
),
used AS (
    SELECT e.state_group_before AS state_group FROM room JOIN events e USING (room_nid)
        WHERE NOT e.outlier
    UNION
    SELECT e.state_group_after FROM room JOIN events e USING (room_nid) WHERE NOT e.outlier
    UNION
    SELECT current_state_group FROM room
),
needed AS (
    SELECT g.state_group - unnest(g.back) AS state_group
    FROM used
    JOIN state_groups g USING (state_group)
    UNION
    SELECT g.state_group FROM room JOIN state_groups g USING (room_nid) WHERE g.entry_count = 0
)
SELECT g.state_group
FROM room
JOIN state_groups g USING (room_nid)
WHERE NOT EXISTS (SELECT FROM needed n WHERE n.state_group = g.state_group)
ORDER BY cardinality(g.back) DESC, g.state_group
LIMIT $2::bigint
"""

SQL_LATEST: Final[LiteralString] = """
SELECT COALESCE(max(e.stream_ordering), 0)
FROM rooms r
JOIN events e USING (room_nid)
WHERE r.room_id = $1::text AND NOT e.outlier
"""

SQL_DELETE: Final[LiteralString] = """
WITH RECURSIVE
-- used since, or written since and used by no event; an array, as the plan would reckon with a
-- third of all rows
new AS (
    SELECT unnest(ARRAY(
        SELECT state_group_before AS state_group FROM events
            WHERE room_nid = $1::int AND stream_ordering > $3::bigint
        UNION
        SELECT state_group_after FROM events
            WHERE room_nid = $1::int AND stream_ordering > $3::bigint
        UNION
        SELECT current_state_group FROM rooms WHERE room_nid = $1::int
        UNION
        SELECT state_group FROM state_groups
            WHERE room_nid = $1::int AND age(xmin) <= age($4::text::xid)
    )) AS state_group
),
kept AS (  -- and what these fold, and what that folds itself: whatever stays can be read
    SELECT state_group
    FROM new
    UNION
    SELECT g.state_group - b.distance
    FROM kept k
    CROSS JOIN LATERAL (SELECT x.* FROM state_groups x
        WHERE x.state_group = k.state_group OFFSET 0) AS g
    CROSS JOIN unnest(g.back) AS b (distance)
)
DELETE FROM state_groups
WHERE state_group IN (SELECT unnest($2::bigint[]) EXCEPT SELECT state_group FROM kept)
    AND room_nid = $1::int
RETURNING state_group
"""

WORK: Final = "a collection of state groups"
TABLES: Final = ("events", "rooms", "state_groups")
"""Where it looks up what is needed: an index of one of these that lies would have it delete what is in use."""

FOUND_MAX: Final = 100_000  # groups looked up at a time
DELETED_MAX: Final = 1_000  # groups deleted in one transaction


class Collected(NamedTuple):
    """What was freed in a room."""

    room_id: str
    state_groups: int


class UnusedStateGroups(NamedTuple):
    """Groups that were not needed when the room's latest event stood at ``upto``, by what was committed by transactions before ``horizon`` (xid)."""

    state_groups: list[int]
    upto: int
    horizon: str


async def collect(
    database: Database, room_id: str, *, batch: int = DELETED_MAX, indexes_proven: bool = False
) -> Collected:
    """Delete the groups of a room that nothing refers to, ``batch`` at a time, with pauses (`Config.purge_pause_ms`) for writers.

    ``indexes_proven``: the caller has called `prove_indexes`. `UnknownRoom`; `StorageCorrupt` if an index lies: then nothing is deleted.
    """
    if not indexes_proven:
        await prove_indexes(database, WORK, TABLES)
    await register_writer(database)
    deleted = 0
    while True:
        garbage = await find(database, room_id)
        freed = 0
        for start in range(0, len(garbage.state_groups), batch):
            if start:
                await asyncio.sleep(database.config.purge_pause_ms / 1000)
            freed += await _delete(
                database,
                room_id,
                garbage._replace(state_groups=garbage.state_groups[start : start + batch]),
            )
        deleted += freed
        if not freed or len(garbage.state_groups) < FOUND_MAX:
            return Collected(room_id, deleted)


async def collect_all(database: Database, *, batch: int = DELETED_MAX) -> AsyncIterator[Collected]:
    """The same for every room; those where something was freed.

    The indexes are compared once, before the first room.
    """
    await prove_indexes(database, WORK, TABLES)
    async for room_id in all_rooms(database):
        collected = await collect(database, room_id, batch=batch, indexes_proven=True)
        if collected.state_groups:
            yield collected


async def find(database: Database, room_id: str) -> UnusedStateGroups:
    """The groups of a room that nothing refers to, ends of paths first. Reads only."""
    async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
        seen = await xmin_horizon(conn)
        return UnusedStateGroups(
            await conn.fetchvals(SQL_GARBAGE, room_id, FOUND_MAX),
            await conn.fetchval(SQL_LATEST, room_id),
            seen,
        )


async def _delete(database: Database, room_id: str, garbage: UnusedStateGroups) -> int:
    """Delete those that are still not needed; how many."""

    async def work(conn: Connection) -> int:
        room_nid = await lock_room_keeping_plans(conn, room_id)
        deleted: list[int] = await conn.fetchvals(SQL_DELETE, room_nid, *garbage)
        if deleted:
            await publish_removed(conn, room_id, "state_groups", map(str, deleted))
        return len(deleted)

    return await database.run(work)
