"""Delete the retained events that nothing needs, at the end of a purge.

An event is needed if a state group, the current state or a membership names it. It is also needed
if an event names it that is not retained, or is needed itself: as an auth event, or as its
redaction. These references are looked up page by page without a lock. Under the room's lock, before
each batch is deleted, those written since are read as well. An event goes before the events that it
cites, so between two batches every stored event has its references. Chains of the chain cover lose
only their last events.
"""

from collections.abc import Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.connection import Connection, Database
from storage.database.placeholders import compose
from storage.maintenance.expiry import xmin_horizon
from storage.maintenance.purge.history import PurgeContext
from storage.maintenance.purge.job import PurgeJob, count
from storage.maintenance.purge.references import References, RoomOrderVersion, stand_of
from storage.maintenance.purge.removal import PurgedEventRow, Removal, delete, follow, take
from storage.persist.room_lock import lock_room_keeping_plans
from storage.streams.invalidate_caches import publish_removed

PAGE: Final = 2_000
GROUPS: Final = 500
BATCHES: Final = 4
"""Batches that go at once: under the lock, the second lookup takes longer than deleting the rows.
"""

SQL_BACK: Final[LiteralString] = """
DELETE FROM purge_retained_events l
WHERE l.room_nid = $1::int AND NOT EXISTS (
    SELECT
    FROM events e
    WHERE e.event_nid = l.event_nid
        AND (e.outlier OR (e.topological_ordering < $2::bigint AND e.stream_ordering <= $3::bigint))
)
"""

SQL_RETAINED: Final[LiteralString] = compose(
    """
SELECT l.event_nid, e.event_id, l.local, e.outlier,
    array_remove(array_append(:auth_nids.call(e), e.redacted_by), NULL) AS named
FROM (
    SELECT *
    FROM purge_retained_events
    WHERE room_nid = $1::int AND event_nid > $2::bigint
    ORDER BY event_nid
    LIMIT $3::bigint
) AS l
CROSS JOIN LATERAL (SELECT x.* FROM events x WHERE x.event_nid = l.event_nid OFFSET 0) AS e
ORDER BY l.event_nid
""",
    AUTH_NIDS,
).sql

SQL_ROOM_GROUPS: Final[LiteralString] = """
SELECT state_group
FROM state_groups
WHERE room_nid = $1::int
"""

SQL_GROUPS: Final[LiteralString] = """
SELECT state_group AS nid,
    array_remove(array_append(COALESCE(event_nids, '{}') || COALESCE(member_event_nids, '{}'),
        event_nid), NULL) AS event_nids
FROM state_groups
WHERE state_group = ANY($1::bigint[])
"""

SQL_NEW_GROUPS: Final[LiteralString] = """
SELECT state_group AS nid,
    array_remove(array_append(COALESCE(event_nids, '{}') || COALESCE(member_event_nids, '{}'),
        event_nid), NULL) AS event_nids
FROM state_groups
WHERE room_nid = $1::int AND age(xmin) <= age($2::text::xid)
"""

SQL_TIMELINE: Final[LiteralString] = compose(
    """
SELECT event_nid, topological_ordering, stream_ordering,
    array_remove(array_append(:auth_nids.call, redacted_by), NULL) AS named
FROM events
WHERE room_nid = $1::int AND NOT outlier
    AND (topological_ordering, stream_ordering) > ($2::bigint, $3::bigint)
ORDER BY topological_ordering, stream_ordering
LIMIT $4::bigint
""",
    AUTH_NIDS,
).sql

SQL_OUTLIERS: Final[LiteralString] = compose(
    """
SELECT event_nid AS nid,
    array_remove(array_append(:auth_nids.call, redacted_by), NULL) AS event_nids
FROM events
WHERE room_nid = $1::int AND outlier AND event_nid > $2::bigint
ORDER BY event_nid
LIMIT $3::bigint
""",
    AUTH_NIDS,
).sql

SQL_SINCE: Final[LiteralString] = compose(
    """
SELECT event_nid AS nid,
    array_remove(array_append(:auth_nids.call, redacted_by), NULL) AS event_nids
FROM events
WHERE room_nid = $1::int AND NOT outlier AND stream_ordering > $2::bigint
UNION ALL
SELECT event_nid AS nid, array_remove(array_append(:auth_nids.call, redacted_by), NULL)
FROM events
WHERE room_nid = $1::int AND outlier AND age(xmin) <= age($3::text::xid)
""",
    AUTH_NIDS,
).sql

SQL_MEMBERS: Final[LiteralString] = """
SELECT event_nid
FROM current_state
WHERE room_nid = $1::int
UNION
SELECT m.event_nid
FROM unnest($2::bigint[]) AS l (event_nid)
CROSS JOIN LATERAL (SELECT x.state_key_nid FROM events x
    WHERE x.event_nid = l.event_nid AND x.membership IS NOT NULL OFFSET 0) AS e
CROSS JOIN LATERAL (SELECT x.state_key FROM state_keys x
    WHERE x.state_key_nid = e.state_key_nid OFFSET 0) AS k
CROSS JOIN LATERAL (SELECT x.principal_nid FROM principals x
    WHERE x.name = k.state_key OFFSET 0) AS p
CROSS JOIN LATERAL (SELECT x.event_nid FROM memberships x
    WHERE x.principal_nid = p.principal_nid AND x.room_nid = $1::int OFFSET 0) AS m
UNION
SELECT o.event_nid
FROM outlier_memberships o
WHERE o.event_nid = ANY($2::bigint[])
"""

SQL_ROWS: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.event_id, e.topological_ordering, e.stream_ordering, e.type_nid,
    e.state_key_nid IS NOT NULL AS is_state,
    e.rejected IS NOT NULL AS is_rejected, e.soft_failed, e.ineffective, e.backfilled,
        false AS local, :prev_nids.call(e) AS prev_events
FROM events e
WHERE e.event_nid = ANY($1::bigint[]) AND NOT e.outlier
""",
    PREV_NIDS,
).sql


class RetainedEventRow(NamedTuple):
    """A retained event, and the events that it names: its auth events and its redaction."""

    event_nid: int
    event_id: str
    local: bool
    outlier: bool
    named: list[int]


class NamingRow(NamedTuple):
    """An event, or a state group, and the events that it names."""

    nid: int
    event_nids: list[int]


class PlacedRow(NamedTuple):
    """An event of the timeline, and the events that it names."""

    event_nid: int
    topological_ordering: int
    stream_ordering: int
    named: list[int]


class RetainedEvents:
    """The retained events of a room, and which of them are needed.

    ``horizon``: everything committed by an older transaction (xid) has been read.
    """

    def __init__(self, job: PurgeJob, position: int, write_version: int, horizon: str) -> None:
        self.job = job
        self.position = position
        self.write_version = write_version
        self.horizon = horizon
        self.rows: dict[int, RetainedEventRow] = {}
        self.needed: set[int] = set()

    def need(self, nids: Iterable[int]) -> None:
        """Mark these events as needed, and those that they name."""
        queue = [nid for nid in nids if nid in self.rows and nid not in self.needed]
        while queue:
            nid = queue.pop()
            if nid not in self.needed:
                self.needed.add(nid)
                queue.extend(named for named in self.rows[nid].named if named in self.rows)

    def free(self) -> list[int]:
        """Return the events that nothing needs, each before those that it names."""
        free = self.rows.keys() - self.needed
        naming = dict.fromkeys(free, 0)
        for nid in free:
            for named in set(self.rows[nid].named) & free:
                naming[named] += 1
        queue = sorted(nid for nid, number in naming.items() if not number)
        ordered: list[int] = []
        while queue:
            nid = queue.pop()
            ordered.append(nid)
            for named in set(self.rows[nid].named) & free:
                naming[named] -= 1
                if not naming[named]:
                    queue.append(named)
        return ordered


async def sweep(context: PurgeContext, job: PurgeJob, kept: References) -> PurgeJob:
    """Delete the retained events that nothing needs."""
    retained = await _read_retained(context.database, job)
    queue = retained.free()
    while queue:
        batch = queue[: BATCHES * context.pace.batch]
        job, deleted = await _sweep(context, job, kept, retained, batch)
        kept.deleted |= deleted
        for nid in batch:
            if nid in deleted:
                del retained.rows[nid]
        queue = retained.free() if len(deleted) < len(batch) else queue[len(batch) :]
        await context.pace.rest(job)
    return job


async def _read_retained(database: Database, job: PurgeJob) -> RetainedEvents:
    async def begin(conn: Connection) -> RetainedEvents:
        await lock_room_keeping_plans(conn, job.room_id)
        stand = await stand_of(conn, job.room_nid)
        return RetainedEvents(job, stand.position, stand.write_version, await xmin_horizon(conn))

    retained = await database.run(begin)
    room_nid, cut = job.room_nid, job.cut
    async with database.connection() as conn:
        await conn.execute(
            SQL_BACK, room_nid, 0 if cut is None else cut.topological, job.arrived_upto
        )
        at = 0
        while rows := await conn.fetch(SQL_RETAINED, room_nid, at, PAGE, row=RetainedEventRow):
            retained.rows.update((row.event_nid, row) for row in rows)
            at = rows[-1].event_nid
        retained.need(nid for nid, row in retained.rows.items() if row.local and not job.local)
        await _roots(conn, retained)
    return retained


async def _roots(conn: Connection, retained: RetainedEvents) -> None:
    room_nid = retained.job.room_nid
    numbers: list[int] = await conn.fetchvals(SQL_ROOM_GROUPS, room_nid)
    for start in range(0, len(numbers), GROUPS):
        for group in await conn.fetch(SQL_GROUPS, numbers[start : start + GROUPS], row=NamingRow):
            retained.need(group.event_nids)
    nids = list(retained.rows)
    for start in range(0, len(nids) or 1, PAGE):
        retained.need(await conn.fetchvals(SQL_MEMBERS, room_nid, nids[start : start + PAGE]))
    after = (-(1 << 62), 0)
    while rows := await conn.fetch(SQL_TIMELINE, room_nid, *after, PAGE, row=PlacedRow):
        for row in rows:
            if row.event_nid not in retained.rows:
                retained.need(row.named)
        after = (rows[-1].topological_ordering, rows[-1].stream_ordering)
    at = 0
    while outliers := await conn.fetch(SQL_OUTLIERS, room_nid, at, PAGE, row=NamingRow):
        for outlier in outliers:
            if outlier.nid not in retained.rows:
                retained.need(outlier.event_nids)
        at = outliers[-1].nid


async def _sweep(
    context: PurgeContext,
    job: PurgeJob,
    kept: References,
    retained: RetainedEvents,
    batch: list[int],
) -> tuple[PurgeJob, set[int]]:
    """Delete one batch, except for events needed since; return the job and the deleted nids."""

    async def work(conn: Connection) -> tuple[PurgeJob, set[int], RoomOrderVersion]:
        await lock_room_keeping_plans(conn, job.room_id)
        context.pace.locked()
        stand = await kept.since(conn)
        if stand.write_version != retained.write_version:
            await _since(conn, retained)
        retained.need(stand.forward_extremities)  # an event that came back and has no child yet
        going = [nid for nid in batch if nid not in retained.needed]
        staying = [nid for nid in going if not retained.rows[nid].outlier]
        changed: list[str] = []
        if staying:
            removal = Removal(deleted=await conn.fetch(SQL_ROWS, staying, row=PurgedEventRow))
            await take(conn, job.room_nid, removal)
            changed = await follow(conn, kept, removal)
        outliers = [nid for nid in going if retained.rows[nid].outlier]
        swept = await delete(conn, job.room_nid, outliers, outliers, outliers_only=True)
        counted = await count(conn, job, swept=swept, deleted=len(staying), phase="sweep")
        if going:
            nid_names = (f"#{nid}" for nid in going)
            await publish_removed(
                conn,
                job.room_id,
                "held",
                {*changed, *(retained.rows[nid].event_id for nid in going), *nid_names},
            )
        return counted, set(going), stand

    with context.pace.measured():
        job, deleted_nids, stand = await context.database.run(work)
    kept.position = retained.position = stand.position
    retained.write_version = stand.write_version
    return job, deleted_nids


async def _since(conn: Connection, retained: RetainedEvents) -> None:
    """Mark retained events as needed by references written since the last call."""
    room_nid, seen = retained.job.room_nid, await xmin_horizon(conn)
    for one in await conn.fetch(
        SQL_SINCE, room_nid, retained.position, retained.horizon, row=NamingRow
    ):
        if one.nid not in retained.rows:
            retained.need(one.event_nids)
    for group in await conn.fetch(SQL_NEW_GROUPS, room_nid, retained.horizon, row=NamingRow):
        retained.need(group.event_nids)
    retained.horizon = seen
