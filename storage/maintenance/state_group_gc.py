"""Delete unreferenced state groups: left by superseded merges, purged events and repairs.

A group is needed if it is the state before or after an event or a room's current state. It is also
needed if it is on the path of a needed group. The empty state of a room is always kept. Unneeded
groups are looked up in a snapshot, without a lock. Then they are deleted in bounded batches under
the room's lock (`storage.persist.room_lock`), after a second lookup of references made since.
Positions are taken under the same lock, so new events have larger stream orderings. A plan that
would refer to a deleted group in a writer's cache is refused
(storage/persist/write/dependencies.py). One row per batch tells writers what to forget.

An index that misses rows would make groups in use look like garbage. So the indexes are compared
with their tables first.

The last groups of paths are deleted first, so that the remaining groups can be read between any two
batches.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.database.pace import Pace
from storage.errors import UnknownRoom
from storage.maintenance.expiry import xmin_horizon
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.maintenance.totals import room_total
from storage.maintenance.verify.run import all_rooms
from storage.observability.counters import Counted, Report, silent
from storage.persist.room_lock import lock_room_keeping_plans
from storage.streams.invalidate_caches import publish_removed, register_writer

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
    SELECT step.part AS state_group
    FROM used
    CROSS JOIN LATERAL state_path(used.state_group) AS step
    UNION
    SELECT g.state_group FROM room JOIN state_groups g USING (room_nid) WHERE g.entry_count = 0
)
SELECT g.state_group
FROM (  -- not a join, which could compare each group with each
    SELECT g.state_group FROM room JOIN state_groups g USING (room_nid)
    EXCEPT
    SELECT state_group FROM needed
) AS g
ORDER BY (SELECT count(*) FROM state_path(g.state_group)) DESC, g.state_group
LIMIT $2::bigint
"""

SQL_LATEST: Final[LiteralString] = """
SELECT COALESCE(max(e.stream_ordering), 0)
FROM rooms r
JOIN events e USING (room_nid)
WHERE r.room_id = $1::text AND NOT e.outlier
"""

SQL_DELETE: Final[LiteralString] = """
WITH
-- used or written since the lookup; an array, because for a subquery the planner would estimate a
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
kept AS (  -- with the groups on their paths: every group that stays can be read
    SELECT step.part AS state_group
    FROM new
    CROSS JOIN LATERAL state_path(new.state_group) AS step
)
DELETE FROM state_groups
WHERE state_group IN (SELECT unnest($2::bigint[]) EXCEPT SELECT state_group FROM kept)
    AND room_nid = $1::int
RETURNING state_group
"""

SQL_UNKNOWN: Final[LiteralString] = """
SELECT i.room_id
FROM unnest($1::text[]) AS i (room_id)
LEFT JOIN rooms r USING (room_id)
WHERE r.room_nid IS NULL
"""

WORK: Final = "a collection of state groups"
TABLES: Final = ("events", "rooms", "state_groups")
"""The tables in which references are looked up.

With a corrupt index of one of them, groups in use would be deleted.
"""

FOUND_MAX: Final = 100_000  # groups looked up at a time
DELETED_MAX: Final = 1_000  # groups deleted in one transaction


class Collected(NamedTuple):
    """How many groups of a room were deleted."""

    room_id: str
    state_groups: int


class UnusedStateGroups(NamedTuple):
    """Groups that were not needed when the room's latest event was at ``upto``.

    Everything that transactions before ``horizon`` (xid) committed was taken into account.
    """

    state_groups: list[int]
    upto: int
    horizon: str


async def collect(
    database: Database,
    room_id: str,
    *,
    batch: int = DELETED_MAX,
    indexes_compared: bool = False,
    counted: Counted | None = None,
) -> Collected:
    """Delete the unreferenced groups of a room in batches, with pauses for writers.

    The pause is `Config.purge_pause_ms`. ``indexes_compared``: the caller has called
    `refuse_corrupt_indexes`. ``counted`` counts the room.
    Raise `UnknownRoom`, or `StorageCorrupt` if an index is corrupt: nothing is deleted then.
    """
    if not indexes_compared:
        await refuse_corrupt_indexes(database, WORK, TABLES)
    await register_writer(database)
    deleted, pace = 0, Pace(database.config.purge_pause_ms / 1000)
    while True:
        garbage = await find(database, room_id)
        freed = 0
        for start in range(0, len(garbage.state_groups), batch):
            if start:
                if counted is not None:
                    counted.within(start / len(garbage.state_groups))
                await pace.rest()
            freed += await _delete(
                database,
                room_id,
                garbage._replace(state_groups=garbage.state_groups[start : start + batch]),
            )
        deleted += freed
        if not freed or len(garbage.state_groups) < FOUND_MAX:
            if counted is not None:
                counted.add()
            return Collected(room_id, deleted)


async def collect_rooms(
    database: Database, room_ids: Sequence[str], *, report: Report = silent
) -> list[Collected]:
    """Do the same for these rooms. Raise `UnknownRoom` for one of them before anything is done."""
    async with database.connection() as conn:
        for room_id in await conn.fetchvals(SQL_UNKNOWN, list(room_ids)):
            raise UnknownRoom(room_id)
    await refuse_corrupt_indexes(database, WORK, TABLES, report=report)
    counted = Counted(report, "collect", len(room_ids), "rooms")
    return [
        await collect(database, room_id, indexes_compared=True, counted=counted)
        for room_id in room_ids
    ]


async def collect_all(
    database: Database, *, batch: int = DELETED_MAX, report: Report = silent
) -> AsyncIterator[Collected]:
    """Do the same for every room; yield the rooms where groups were deleted.

    The indexes are compared once, before the first room.
    """
    await refuse_corrupt_indexes(database, WORK, TABLES, report=report)
    async with database.connection() as conn:
        counted = Counted(report, "collect", await room_total(conn), "rooms")
    async for room_id in all_rooms(database):
        collected = await collect(
            database, room_id, batch=batch, indexes_compared=True, counted=counted
        )
        if collected.state_groups:
            yield collected


async def find(database: Database, room_id: str) -> UnusedStateGroups:
    """Return the unreferenced groups of a room, those at the end of paths first. Read only."""
    async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
        seen = await xmin_horizon(conn)
        return UnusedStateGroups(
            await conn.fetchvals(SQL_GARBAGE, room_id, FOUND_MAX),
            await conn.fetchval(SQL_LATEST, room_id),
            seen,
        )


async def _delete(database: Database, room_id: str, garbage: UnusedStateGroups) -> int:
    """Delete those that are still not needed; return how many."""

    async def work(conn: Connection) -> int:
        room_nid = await lock_room_keeping_plans(conn, room_id)
        deleted: list[int] = await conn.fetchvals(SQL_DELETE, room_nid, *garbage)
        if deleted:
            await publish_removed(conn, room_id, "state_groups", map(str, deleted))
        return len(deleted)

    return await database.run(work)
