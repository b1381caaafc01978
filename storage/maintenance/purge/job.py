"""The rows of `purge_jobs`: arguments and progress of purges, and one purge per room at a time.

A job has a row from its first transaction on, and each transaction adds to its counts. The process
that runs it holds an advisory lock of a session, so a killed process releases it. The next call
resumes the unfinished row.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, LiteralString, NamedTuple

from storage.config import Config
from storage.database.connection import Connection, Database
from storage.database.pace import Pace, fitting
from storage.database.placeholders import fill
from storage.errors import PurgeRunning
from storage.maintenance.purge.cut_point import CutPoint
from storage.observability.counters import Progress, Report, silent

SQL_LOCK: Final[LiteralString] = fill("SELECT pg_try_advisory_lock({LOCK_PURGE}, $1::int)")
SQL_UNLOCK: Final[LiteralString] = fill("SELECT pg_advisory_unlock({LOCK_PURGE}, $1::int)")

SQL_BEGIN: Final[LiteralString] = """
INSERT INTO purge_jobs (job_id, room_nid, room_id, topological_cut, stream_cut, arrived_upto, local,
    phase, started_ts, updated_ts)
SELECT nextval('purge_job_ids'), r.room_nid, r.room_id, $2::bigint, $3::bigint,
    (SELECT last_value FROM events_stream), $4::boolean, $5::text,
    $6::bigint, $6::bigint
FROM rooms r
WHERE r.room_nid = $1::int
RETURNING job_id, room_nid, room_id, topological_cut, stream_cut, arrived_upto, local, phase,
    deleted_count, set_aside_count, swept_count,
    state_group_count, started_ts, updated_ts, finished_ts, error
"""

SQL_UNFINISHED: Final[LiteralString] = """
SELECT job_id, room_nid, room_id, topological_cut, stream_cut, arrived_upto, local, phase,
    deleted_count, set_aside_count, swept_count,
    state_group_count, started_ts, updated_ts, finished_ts, error
FROM purge_jobs
WHERE room_nid = $1::int AND finished_ts IS NULL
ORDER BY job_id
LIMIT 1
"""

SQL_JOBS: Final[LiteralString] = """
SELECT job_id, room_nid, room_id, topological_cut, stream_cut, arrived_upto, local, phase,
    deleted_count, set_aside_count, swept_count,
    state_group_count, started_ts, updated_ts, finished_ts, error
FROM purge_jobs
ORDER BY job_id DESC
LIMIT $1::bigint
"""

SQL_BEGUN: Final[LiteralString] = """
SELECT job_id, room_nid, room_id, topological_cut, stream_cut, arrived_upto, local, phase,
    deleted_count, set_aside_count, swept_count,
    state_group_count, started_ts, updated_ts, finished_ts, error
FROM purge_jobs
WHERE finished_ts IS NULL
ORDER BY job_id
"""

SQL_RUNNING: Final[LiteralString] = fill("""
SELECT l.objid::int
FROM pg_locks l
JOIN pg_database d ON d.oid = l.database
WHERE d.datname = current_database() AND l.locktype = 'advisory'
    AND l.classid = {LOCK_PURGE} AND l.objsubid = 2 AND l.granted
""")

SQL_COUNT: Final[LiteralString] = """
UPDATE purge_jobs
SET deleted_count = deleted_count + $2::bigint,
    set_aside_count = set_aside_count + $3::bigint,
    swept_count = swept_count + $4::bigint,
    state_group_count = state_group_count + $5::bigint,
    phase = $6::text,
    updated_ts = (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    finished_ts = CASE WHEN $6::text = 'done'
        THEN (extract(epoch FROM clock_timestamp()) * 1000)::bigint END,
    error = NULL
WHERE job_id = $1::int
RETURNING job_id, room_nid, room_id, topological_cut, stream_cut, arrived_upto, local, phase,
    deleted_count, set_aside_count, swept_count,
    state_group_count, started_ts, updated_ts, finished_ts, error
"""

SQL_FAILED: Final[LiteralString] = """
UPDATE purge_jobs
SET error = $2::text
WHERE job_id = $1::int
"""


class PurgeJob(NamedTuple):
    """A purge: its cut, its phase, what it has done so far, and when (ms)."""

    job_id: int
    room_nid: int
    room_id: str
    topological_cut: int | None
    stream_cut: int | None
    arrived_upto: int
    local: bool
    phase: str
    deleted_count: int
    set_aside_count: int
    swept_count: int
    state_group_count: int
    started_ts: int
    updated_ts: int
    finished_ts: int | None
    error: str | None

    @property
    def cut(self) -> CutPoint | None:
        """Return the cut, or None if the job takes the whole room."""
        return (
            None
            if self.topological_cut is None or self.stream_cut is None
            else CutPoint(self.topological_cut, self.stream_cut)
        )


@asynccontextmanager
async def alone(database: Database, room_id: str, room_nid: int) -> AsyncIterator[None]:
    """Be the only purge of a room. Raise `PurgeRunning`.

    The lock is on a connection outside of the pool: its end releases the lock also if this is
    cancelled before the answer, and many purges leave the pool to their statements.
    """
    async with database.apart() as conn:
        if not await conn.fetchval(SQL_LOCK, room_nid):
            raise PurgeRunning(
                "another purge of it is under way, see `room-storage purge --jobs`", room_id=room_id
            )
        try:
            yield
        finally:
            await conn.fetchval(SQL_UNLOCK, room_nid)


async def begin(
    conn: Connection, room_nid: int, cut: CutPoint | None, *, local: bool, now_ts: int
) -> PurgeJob | None:
    """Insert a new job and return it.

    Call it in a transaction that locks the room, so that all arrived events are below the position
    that the job stores.
    """
    phase = "room" if cut is None else "history"
    topological, stream = (None, None) if cut is None else cut
    return await conn.fetchrow(
        SQL_BEGIN, room_nid, topological, stream, local, phase, now_ts, row=PurgeJob
    )


async def unfinished(conn: Connection, room_nid: int) -> PurgeJob | None:
    return await conn.fetchrow(SQL_UNFINISHED, room_nid, row=PurgeJob)


async def begun(database: Database) -> list[PurgeJob]:
    """Return all jobs that are not done: interrupted, or under way."""
    async with database.connection() as conn:
        return await conn.fetch(SQL_BEGUN, row=PurgeJob)


async def jobs(database: Database, limit: int = 100) -> list[PurgeJob]:
    """Return the latest jobs, the latest first."""
    async with database.connection() as conn:
        return await conn.fetch(SQL_JOBS, limit, row=PurgeJob)


async def running(database: Database) -> set[int]:
    """Return the nids of the rooms that a process purges now: it has their locks (`alone`)."""
    async with database.connection() as conn:
        return set(await conn.fetchvals(SQL_RUNNING))


async def count(
    conn: Connection,
    job: PurgeJob,
    *,
    deleted: int = 0,
    outliers: int = 0,
    swept: int = 0,
    state_groups: int = 0,
    phase: str | None = None,
) -> PurgeJob:
    """Record progress in the transaction that makes it; return the job as it is then."""
    counted = await conn.fetchrow(
        SQL_COUNT,
        job.job_id,
        deleted,
        outliers,
        swept,
        state_groups,
        phase or job.phase,
        row=PurgeJob,
    )
    return job if counted is None else counted


async def failed(conn: Connection, job: PurgeJob, reason: str) -> None:
    """Record why the job failed."""
    await conn.execute(SQL_FAILED, job.job_id, reason)


# --------------------------------------------------------------------------------------------------
# Limit what a purge costs others: bounded time under the room's lock, and pauses between.

BATCH_MIN: Final = 20
BATCH_MAX: Final = 500
HOLD_MS: Final = 50  # the time that a transaction should block the room's writers

Watcher = Callable[[PurgeJob], Awaitable[None]]


class PurgeThrottle:
    """Batches as large as fit into `HOLD_MS`, and `Config.purge_pause_ms` after each.

    ``watcher`` is awaited with the job after each commit.
    """

    def __init__(
        self, config: Config, watcher: Watcher | None = None, report: Report = silent
    ) -> None:
        self.report = report
        self.expected: int | None = None
        """The number of events that the job takes, if it was counted."""
        self.batch: int = min(max(BATCH_MAX // 4, BATCH_MIN), BATCH_MAX)
        self._pace = Pace(config.purge_pause_ms / 1000)
        self._watcher = watcher
        self._waited_s = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure one transaction; set the next batch size by its time under the lock (`held`)."""
        pace = self._pace
        start = pace.clock()
        with pace.batch():
            yield
        self._waited_s = pace.began - start
        self.batch = fitting(
            self.batch, pace.took_s, goal_s=HOLD_MS / 1000, least=BATCH_MIN, most=BATCH_MAX
        )

    def locked(self) -> None:
        """Start the clock: the room is locked from now on, and the wait for it does not count."""
        self._pace.restart()

    def _progress(self, job: PurgeJob) -> Progress:
        if job.phase == "sweep":
            # some of them stay
            return Progress(
                "purge state", job.swept_count, job.set_aside_count, "events", is_estimate=True
            )
        done = job.deleted_count + job.set_aside_count
        return Progress("purge", done, self.expected, "events")

    async def rest(self, job: PurgeJob) -> None:
        """Pause, for at least as long as this transaction waited for other writers of the room."""
        self.report(self._progress(job))
        if self._watcher is not None:
            await self._watcher(job)
        await self._pace.rest(least_s=self._waited_s)
