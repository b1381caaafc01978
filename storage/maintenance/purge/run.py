"""Run a purge, from its first query to its last batch."""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

import orjson

from storage.codec import StoredBytes, decode
from storage.config import Config
from storage.database.connection import Connection, Database
from storage.database.deployment import earlier_now_ms, now_ms
from storage.errors import InputError, PartialState, PurgeRunning, StorageError, UnknownRoom
from storage.ids import RoomId
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.maintenance.purge import job as job_rows
from storage.maintenance.purge.cut_point import (
    SQL_ROOM,
    CutPoint,
    PurgedRoomRow,
    before_event,
    before_time,
)
from storage.maintenance.purge.history import SQL_TAKEN, PurgeContext, purge_below
from storage.maintenance.purge.job import PurgeJob, PurgeThrottle, Watcher
from storage.maintenance.purge.references import ReorderedMeanwhile
from storage.maintenance.purge.room import hide, purge_tables, refuse_joined
from storage.maintenance.purge.sweep import sweep
from storage.maintenance.purge.visibility_cleanup import remove_unused_visibility
from storage.maintenance.state_group_gc import collect
from storage.maintenance.totals import room_total
from storage.observability.counters import Counted, Progress, Report, silent
from storage.persist.room_lock import lock_room, lock_room_keeping_plans
from storage.queries.gaps import refuse_partial
from storage.streams.invalidate_caches import invalidate_caches, register_writer

# --------------------------------------------------------------------------------------------------
# Read how long rooms keep their history.
#
# That is `m.room.retention` of the current state within the operator's limits, or the operator's
# default. Source: MSC1763. ``max_lifetime`` counts from when this server received an event, because
# a sender can claim any time. The last event of a room always stays.

SQL_POLICIES: Final[LiteralString] = """
SELECT r.room_id, e.event_id, e.json
FROM (
    SELECT room_nid, room_id
    FROM rooms
    WHERE room_id > $1::text AND current_state_group IS NOT NULL
    ORDER BY room_id
    LIMIT 1000
) AS r
LEFT JOIN event_types t ON t.type = 'm.room.retention'
LEFT JOIN state_keys k ON k.type_nid = t.type_nid AND k.state_key = ''
LEFT JOIN LATERAL (
    SELECT event_nid FROM current_state
    WHERE room_nid = r.room_nid AND state_key_nid = k.state_key_nid
    OFFSET 0
) AS c ON true
LEFT JOIN LATERAL (
    SELECT event_id, json FROM events
    WHERE event_nid = c.event_nid AND NOT redacted_form AND redacted_by IS NULL
    OFFSET 0
) AS e ON true
ORDER BY r.room_id
"""


class PolicyRow(NamedTuple):
    """A room and the event with its policy; None if it has none."""

    room_id: str
    event_id: str | None
    json: StoredBytes | None

    @property
    def raw(self) -> bytes | None:
        if self.json is None or self.event_id is None:
            return None
        return decode(self.json, self.event_id, self.room_id)


class Policy(NamedTuple):
    """A room that keeps its history for this time (ms)."""

    room_id: str
    lifetime_ms: int


async def policies(
    conn: Connection, config: Config, after: str = ""
) -> tuple[list[Policy], int, str | None]:
    """Return the next thousand rooms' policies, of those with a bounded lifetime.

    Return also the number of rooms, and the last room id, to continue from, or None.
    """
    rows = await conn.fetch(SQL_POLICIES, after, row=PolicyRow)
    room_policies = [
        Policy(row.room_id, lifetime)
        for row in rows
        if (lifetime := lifetime_ms(row.raw, config)) is not None
    ]
    return room_policies, len(rows), rows[-1].room_id if rows else None


def lifetime_ms(raw: bytes | None, config: Config) -> int | None:
    """Return how long a room keeps its history; None for ever.

    A value that is no positive integer counts as absent.
    """
    content = {} if raw is None else orjson.loads(raw).get("content")
    lifetime = content.get("max_lifetime") if isinstance(content, dict) else None
    if not isinstance(lifetime, int) or isinstance(lifetime, bool) or lifetime <= 0:
        return config.retention_lifetime_ms_default or None
    longest = config.retention_lifetime_ms_max or lifetime
    return max(min(lifetime, longest), config.retention_lifetime_ms_min)


WORK: Final = "a purge"
DELTAS: Final = 1_000
COUNTED: Final = 10_000
"""Events counted by one statement of a dry run."""

SQL_DELTAS: Final[LiteralString] = """
WITH
gone AS (
    DELETE FROM state_deltas d
    USING (
        SELECT room_nid, stream_ordering, state_key_nid
        FROM state_deltas
        WHERE room_nid = $1::int AND stream_ordering <= $2::bigint
        ORDER BY stream_ordering
        LIMIT $3::bigint
    ) AS old
    WHERE d.room_nid = old.room_nid AND d.stream_ordering = old.stream_ordering
        AND d.state_key_nid = old.state_key_nid
    RETURNING d.stream_ordering
),
purged AS (
    INSERT INTO purged_streams (stream_name, purged_upto)
    SELECT 'events', max(stream_ordering)
    FROM gone
    HAVING count(*) > 0
    ON CONFLICT (stream_name) DO UPDATE SET purged_upto = GREATEST(purged_streams.purged_upto,
        EXCLUDED.purged_upto)
)
SELECT count(*)
FROM gone
"""

SQL_LOWEST: Final[LiteralString] = """
UPDATE rooms r
SET out_of_range = r.out_of_range * int8multirange(int8range((
    SELECT e.topological_ordering
    FROM events e
    WHERE e.room_nid = r.room_nid AND NOT e.outlier
    ORDER BY e.topological_ordering, e.stream_ordering
    LIMIT 1
), NULL))
WHERE r.room_nid = $1::int AND r.out_of_range <> '{}'
"""


class CountRow(NamedTuple):
    """How many of a page of events would be taken, and where the page ends."""

    taken: int
    examined: int
    topological_ordering: int | None
    stream_ordering: int | None


class Purged(NamedTuple):
    """Result of a purge, or (``job`` None) a dry run; ``events``: how many leave the timeline."""

    room_id: str
    events: int
    job: PurgeJob | None


async def purge_history(
    database: Database,
    room_id: str,
    *,
    server_name: str,
    before_event_id: str | None = None,
    before_ts: int | None = None,
    local: bool = False,
    dry_run: bool = False,
    watcher: Watcher | None = None,
    report: Report = silent,
    indexes_compared: bool = False,
) -> Purged:
    """Purge the history of a room below an event or a time.

    ``before_ts`` (ms) means the first live event that this server received then or later; for wrong
    clocks see cut_point.py. An earlier, interrupted job of the room is finished first. ``local``:
    also purge events of users of ``server_name``. ``watcher`` is awaited with the job after each
    transaction; an exception from it ends the purge, and the job can be resumed.
    ``indexes_compared``: the caller has called `refuse_corrupt_indexes`.

    Raise `UnknownRoom`, `UnknownEvent`, `PurgeRefused`, `PurgeRunning`, `PartialState` for a room
    whose members are not all known, or `StorageCorrupt` where an index is corrupt: nothing has
    changed then.
    """
    if (before_event_id is None) == (before_ts is None):
        raise InputError("give either the event or the time before which history is purged")
    if not (dry_run or indexes_compared):
        await refuse_corrupt_indexes(database, WORK, report=report)
    room = await _room(database, room_id)
    async with database.connection() as conn:
        now_ts = await earlier_now_ms(conn)
        await refuse_partial(conn, RoomId(room_id))
        if before_event_id is not None:
            cut: CutPoint | None = await before_event(conn, room_id, room, before_event_id)
        else:
            cut = await before_time(conn, room_id, room, before_ts or 0, now_ts)
    if dry_run or cut is None:
        return Purged(room_id, 0 if cut is None else await _counted(database, room, cut), None)
    async with job_rows.alone(database, room_id, room.room_nid):
        context = PurgeContext(
            database, room, server_name, PurgeThrottle(database.config, watcher, report)
        )
        finished = await _finish(context, room.room_nid)
        if finished is not None and finished.cut == cut and finished.local == local:
            return Purged(room_id, finished.deleted_count + finished.set_aside_count, finished)
        if not await _counted(database, room, cut, enough=1):
            return Purged(room_id, 0, None)
        job = await _begin(database, room_id, room.room_nid, cut, local=local, now_ts=now_ts)
        job = await _run(context, job)
    return Purged(room_id, job.deleted_count + job.set_aside_count, job)


async def purge_room(
    database: Database,
    room_id: str,
    *,
    server_name: str,
    force: bool = False,
    dry_run: bool = False,
    watcher: Watcher | None = None,
    report: Report = silent,
) -> Purged:
    """Purge all of a room: afterwards it is unknown. ``force``: also while local users are joined.

    A writer that writes to it meanwhile loses its events. Raise `UnknownRoom`, `PurgeRefused`,
    `PurgeRunning`, or `StorageCorrupt` where an index is corrupt: nothing has changed then.
    """
    if not dry_run:
        await refuse_corrupt_indexes(database, WORK, report=report)
    room = await _room(database, room_id)
    if dry_run:
        return Purged(room_id, await _counted(database, room, CutPoint(1 << 62, 1 << 62)), None)
    async with job_rows.alone(database, room_id, room.room_nid):
        await register_writer(database)
        context = PurgeContext(
            database, room, server_name, PurgeThrottle(database.config, watcher, report)
        )

        async def begin(conn: Connection) -> PurgeJob | None:
            await lock_room(conn, room_id)
            if not force:
                await refuse_joined(conn, room_id, room.room_nid)
            job = await job_rows.unfinished(conn, room.room_nid)
            # a purge of its history is now part of this one
            if job is not None and job.cut is not None:
                await job_rows.count(conn, job, phase="done")
                job = None
            if job is None:
                job = await job_rows.begin(conn, room.room_nid, None, local=True, now_ts=now_ms())
                await hide(conn, room.room_nid)
            return job

        job = await database.run(begin)
        if job is None:
            raise UnknownRoom(room_id)
        job = await _run(context, job)
    return Purged(room_id, job.deleted_count, job)


async def purge_retention(
    database: Database,
    *,
    server_name: str,
    dry_run: bool = False,
    watcher: Watcher | None = None,
    report: Report = silent,
) -> AsyncIterator[Purged]:
    """Purge expired history in every room with a bounded lifetime; yield rooms that lost events.

    Events of local users go, too: a policy means them as well. It skips a room that another purge
    works on. The indexes are compared once, before the first room. Raise `StorageCorrupt` where one
    is corrupt.
    """
    if not dry_run:
        await refuse_corrupt_indexes(database, WORK, report=report)
    async with database.connection() as conn:
        counted = Counted(report, "purge", await room_total(conn), "rooms", is_estimate=True)
    after: str | None = ""
    while after is not None:
        async with database.connection() as conn:
            now_ts = await earlier_now_ms(conn)
            room_policies, examined, after = await policies(conn, database.config, after)
        counted.add(examined - len(room_policies))
        for policy in room_policies:
            before_ts = now_ts - policy.lifetime_ms
            try:
                purged = await purge_history(
                    database,
                    policy.room_id,
                    server_name=server_name,
                    before_ts=before_ts,
                    local=True,
                    dry_run=dry_run,
                    watcher=watcher,
                    report=_within(counted),
                    indexes_compared=True,
                )
            except (PurgeRunning, UnknownRoom, PartialState):
                continue
            finally:
                counted.add()
            if purged.events:
                yield purged


async def resume(
    database: Database,
    *,
    server_name: str,
    watcher: Watcher | None = None,
    report: Report = silent,
) -> AsyncIterator[Purged]:
    """Finish every interrupted purge; yield each as it is done.

    It skips purges that run elsewhere. Raise `StorageCorrupt` where an index is corrupt.
    """
    await refuse_corrupt_indexes(database, WORK, report=report)
    begun = await job_rows.begun(database)
    counted = Counted(silent if len(begun) == 1 else report, "purge", len(begun), "purges")
    shown = report if len(begun) == 1 else _within(counted)  # one purge shows its own progress
    for job in begun:
        try:
            async with job_rows.alone(database, job.room_id, job.room_nid):
                room = await _room(database, job.room_id)
                pace = PurgeThrottle(database.config, watcher, shown)
                context = PurgeContext(database, room, server_name, pace)
                finished = await _finish(context, job.room_nid)
        except (PurgeRunning, UnknownRoom):
            continue
        finally:
            counted.add()
        if finished is not None:
            yield Purged(job.room_id, finished.deleted_count + finished.set_aside_count, finished)


def _within(counted: Counted) -> Report:
    """Return how a purge reports that is one of several."""

    def report(progress: Progress) -> None:
        if progress.phase == "purge":
            counted.within(progress.share)

    return report


async def _room(database: Database, room_id: str) -> PurgedRoomRow:
    async with database.connection() as conn:
        room = await conn.fetchrow(SQL_ROOM, room_id, row=PurgedRoomRow)
    if room is None:
        raise UnknownRoom(room_id)
    return room


async def _counted(
    database: Database, room: PurgedRoomRow, cut: CutPoint, enough: int | None = None
) -> int:
    """Count the events that a purge would take out of the timeline, up to ``enough``."""
    taken, at = 0, (cut.topological, -1)
    while enough is None or taken < enough:
        async with database.connection() as conn:
            upto = (1 << 62, cut.stream)
            row = await conn.fetchrow(SQL_TAKEN, room.room_nid, *at, *upto, COUNTED, row=CountRow)
        if row is None or row.topological_ordering is None or row.stream_ordering is None:
            break
        taken += row.taken
        at = (row.topological_ordering, row.stream_ordering)
    return taken


async def _begin(
    database: Database,
    room_id: str,
    room_nid: int,
    cut: CutPoint | None,
    *,
    local: bool,
    now_ts: int,
) -> PurgeJob:
    async def work(conn: Connection) -> PurgeJob | None:
        await lock_room_keeping_plans(conn, room_id)
        return await job_rows.begin(conn, room_nid, cut, local=local, now_ts=now_ts)

    job = await database.run(work)
    if job is None:
        raise UnknownRoom(room_id)
    return job


async def _finish(context: PurgeContext, room_nid: int) -> PurgeJob | None:
    """Finish the interrupted jobs; return the last one as it is now, if there was one."""
    finished = None
    while True:
        async with context.database.connection() as conn:
            job = await job_rows.unfinished(conn, room_nid)
        if job is None:
            return finished
        finished = await _run(context, job)


async def _run(context: PurgeContext, job: PurgeJob) -> PurgeJob:
    """Run all phases of a job from the beginning: a phase that is done costs one query."""
    try:
        await _expect(context, job)
        await register_writer(context.database)
        if (cut := job.cut) is None:
            return await purge_tables(context, job)
        while True:
            job, kept = await purge_below(context, job, cut)
            job = await _deltas(context, job)
            job = await _groups(context, job)
            try:
                job = await sweep(context, job, kept)
            except ReorderedMeanwhile:
                continue
            return await _end(context, job)
    except StorageError as error:
        await _note(context.database, job, error)
        raise


async def _expect(context: PurgeContext, job: PurgeJob) -> None:
    """Count the events that the job takes, where somebody wants to know."""
    if context.pace.report is silent:
        return
    cut = job.cut or CutPoint(1 << 62, 1 << 62)
    left = await _counted(context.database, context.room, cut)
    context.pace.expected = job.deleted_count + job.set_aside_count + left


async def _note(database: Database, job: PurgeJob, error: StorageError) -> None:
    """Record the reason in the job's row, if the database still answers."""
    try:
        async with database.connection() as conn:
            await job_rows.failed(conn, job, str(error))
    except StorageError as second:
        error.add_note(f"the reason could not be recorded either: {second}")


async def _deltas(context: PurgeContext, job: PurgeJob) -> PurgeJob:
    """Delete the state deltas up to the cut's position."""
    stream = 0 if job.cut is None else job.cut.stream

    async def work(conn: Connection) -> tuple[PurgeJob, int]:
        deleted = int(await conn.fetchval(SQL_DELTAS, job.room_nid, stream, DELTAS))
        return await job_rows.count(conn, job, phase="deltas"), deleted

    deleted = DELTAS
    while deleted == DELTAS:
        job, deleted = await context.database.run(work)
        await context.pace.rest(job)
    return job


async def _groups(context: PurgeContext, job: PurgeJob) -> PurgeJob:
    """Delete state groups that nothing refers to any more."""
    collected = await collect(context.database, job.room_id, indexes_compared=True)

    async def work(conn: Connection) -> PurgeJob:
        return await job_rows.count(conn, job, state_groups=collected.state_groups, phase="groups")

    job = await context.database.run(work)
    await context.pace.rest(job)
    return job


async def _end(context: PurgeContext, job: PurgeJob) -> PurgeJob:
    """Remove unused visibility rows and out-of-range ranges, and invalidate caches of others."""
    collected = await collect(context.database, job.room_id, indexes_compared=True)
    await remove_unused_visibility(context, job)

    async def work(conn: Connection) -> PurgeJob:
        await lock_room(conn, job.room_id)
        await conn.execute(SQL_LOWEST, job.room_nid)
        done = await job_rows.count(conn, job, state_groups=collected.state_groups, phase="done")
        await invalidate_caches(conn, "events")
        return done

    return await context.database.run(work)
