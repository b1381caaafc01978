"""Background jobs: the long data steps of migrations, in small batches while servers run.

A step of a migration registers a job (storage/database/migration_steps.py). `run_jobs` runs it, on
any machine, now or later. A batch is one statement, or a function for work that SQL cannot do. It
has a transaction of its own that also advances the job's row. A killed process loses one batch,
which is done again. Several runners on one job take turns. A batch has the number of rows that
takes about BATCH_SECONDS, and is followed by a pause of the same length.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.database.pace import Pace, fitting
from storage.errors import StorageCorrupt, StorageError

BATCH_SECONDS: Final = 0.2
BATCH_ROWS_MAX: Final = 10_000

SQL_JOBS: Final[LiteralString] = """
SELECT name, revision, place, rows_done, rows_expected, batch_rows, registered_ts, started_ts,
    updated_ts, finished_ts, error
FROM background_jobs
ORDER BY revision, name
"""

SQL_TAKE: Final[LiteralString] = """
SELECT name, revision, place, rows_done, rows_expected, batch_rows, registered_ts, started_ts,
    updated_ts, finished_ts, error
FROM background_jobs
WHERE name = $1::text
FOR UPDATE
"""

SQL_START: Final[LiteralString] = """
UPDATE background_jobs
SET started_ts = $2::bigint,
    rows_expected = $3::bigint
WHERE name = $1::text AND started_ts IS NULL
"""

SQL_PROGRESS: Final[LiteralString] = """
UPDATE background_jobs
SET place = COALESCE($2::bigint, place),
    rows_done = rows_done + $3::bigint,
    batch_rows = $4::int,
    updated_ts = $5::bigint,
    finished_ts = CASE WHEN $2::bigint IS NULL THEN $5::bigint END,
    error = NULL
WHERE name = $1::text
"""

SQL_AGAIN: Final[LiteralString] = """
INSERT INTO background_jobs (name, revision, registered_ts)
VALUES ($1::text, $2::text, $3::bigint)
ON CONFLICT (name) DO UPDATE
SET place = DEFAULT,
    rows_done = DEFAULT,
    rows_expected = NULL,
    registered_ts = EXCLUDED.registered_ts,
    started_ts = NULL,
    updated_ts = NULL,
    finished_ts = NULL,
    error = NULL
WHERE background_jobs.finished_ts IS NOT NULL
"""

SQL_FAILED: Final[LiteralString] = """
UPDATE background_jobs
SET error = $2::text,
    updated_ts = $3::bigint
WHERE name = $1::text
"""


class JobRow(NamedTuple):
    """The progress of a job (schema.sql)."""

    name: str
    revision: str
    place: int
    rows_done: int
    rows_expected: int | None
    batch_rows: int
    registered_ts: int
    started_ts: int | None
    updated_ts: int | None
    finished_ts: int | None
    error: str | None

    @property
    def state(self) -> str:
        """Return one word: waiting, running, done or failed."""
        if self.finished_ts is not None:
            return "done"
        if self.error is not None:
            return "failed"
        return "waiting" if self.started_ts is None else "running"


class BatchRow(NamedTuple):
    """The result of a batch (`Job.batch`)."""

    rows: int
    place: int | None


BatchWork = Callable[[Connection, int, int], Awaitable[BatchRow]]
"""Does a batch in the open transaction: with the parameters and the result of a statement."""


@dataclass(frozen=True, slots=True)
class Job:
    """Long work on data, in batches.

    ``batch`` is one statement. Its parameters are the position after which it starts ($1::bigint,
    at first 0) and the maximum number of rows ($2::int). It returns one row: the number of rows
    done (rows), and the position of the last one (place, NULL at the end). It must be safe to run
    it again. For work that SQL cannot do it is a function of these parameters. ``expected`` is a
    query for the approximate number of rows.
    """

    name: str
    batch: LiteralString | BatchWork
    expected: LiteralString | None = None


async def jobs(conn: Connection) -> list[JobRow]:
    """Return all jobs, done or not, in the order of the migrations."""
    return await conn.fetch(SQL_JOBS, row=JobRow)


async def register_again(conn: Connection, name: str, revision: str) -> None:
    """Register a job, to be run from the beginning. One that is not done goes on where it is."""
    await conn.execute(SQL_AGAIN, name, revision, _now())


async def run_jobs(
    database: Database,
    defined: Mapping[str, Job],
    *,
    pause: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncGenerator[JobRow, None]:
    """Run the registered jobs one after the other; yield the row of a job after each batch.

    ``defined`` maps names to the jobs that the migrations define. Raise `StorageCorrupt` for a job
    that none of them defines. A batch that fails ends the run; its error is stored in the row and
    raised. Earlier batches stay done, and the next run continues after them. ``pause`` is in
    seconds after each batch; None: as long as the batch took.
    """
    pace = Pace(pause, clock)
    async with database.connection() as conn:
        waiting = [row for row in await jobs(conn) if row.finished_ts is None]
    for row in waiting:
        job = defined.get(row.name)
        if job is None:
            raise StorageCorrupt(
                "a registered background job is in no migration of this release: "
                "install the release that registered it",
                job=row.name,
            )
        await _begin(database, job, row)
        while row.finished_ts is None:
            with pace.batch():
                row = await _batch(database, job, clock)  # noqa: PLW2901  # the row as it is by now
            yield row
            await pace.rest()


async def _begin(database: Database, job: Job, row: JobRow) -> None:
    if row.started_ts is None:
        async with database.connection() as conn:
            expected = None if job.expected is None else await conn.fetchval(job.expected)
            await conn.execute(SQL_START, job.name, _now(), expected)


async def _batch(database: Database, job: Job, clock: Callable[[], float]) -> JobRow:
    """Run one batch, under the lock of the job's row."""
    try:
        async with database.transaction() as conn:
            taken = await _taken(conn, job.name)
            if taken.finished_ts is None:  # another runner may have done the last one
                work = Pace(clock=clock)
                with work.batch():
                    done = await _done(conn, job, taken)
                size = fitting(
                    taken.batch_rows, work.took_s, goal_s=BATCH_SECONDS, most=BATCH_ROWS_MAX
                )
                await conn.execute(SQL_PROGRESS, job.name, done.place, done.rows, size, _now())
            return await _taken(conn, job.name)
    except StorageError as error:
        async with database.connection() as conn:
            await conn.execute(SQL_FAILED, job.name, str(error), _now())
        raise


async def _done(conn: Connection, job: Job, taken: JobRow) -> BatchRow:
    if callable(job.batch):
        return await job.batch(conn, taken.place, taken.batch_rows)
    row = await conn.fetchrow(job.batch, taken.place, taken.batch_rows, row=BatchRow)
    return row or BatchRow(0, None)


async def _taken(conn: Connection, name: str) -> JobRow:
    row = await conn.fetchrow(SQL_TAKE, name, row=JobRow)
    if row is None:
        raise StorageCorrupt("the row of a background job is missing", job=name)
    return row


def _now() -> int:
    return time.time_ns() // 1_000_000
