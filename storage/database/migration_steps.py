"""The parts of a revision in `migrations/versions`: its phase, indexes, and background jobs.

    from storage.database.background import Job

    revision, down_revision = "0004", "0003"
    phase: Final[Phase] = "pre"
    job: Final = Job("fill topics", batch=SQL_FILL, expected=SQL_COUNT)

    def upgrade() -> None:
        op.execute("ALTER TABLE events ADD COLUMN topic text")
        background_job(job, revision)

Phases. A "pre" step only adds objects that the code of the release before does not use. It runs
while old processes are live. A "post" step removes objects that only they needed. It is refused
while one of them lives, and from then on code that does not know the step is refused. So a release
is: `room-storage migrate --pre`, replace the processes, `room-storage migrate`.

Each step is a transaction of its own with a short lock_timeout, because everybody queues behind a
step that waits for a lock. An index is a step of its own, because Postgres builds it outside of a
transaction. A step never changes data row by row: that is a `Job` (storage/database/background.py).

Only revisions import this module: it needs alembic.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal, LiteralString, get_args

from alembic import context, op
from alembic.runtime.migration import MigrationContext, MigrationInfo, StampStep
from alembic.script import Script, ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    ColumnElement,
    column,
    delete,
    insert,
    literal,
    literal_column,
    select,
    table,
    update,
)

from storage.database.background import Job
from storage.database.migrate import HEAD_REVISION

logger: logging.Logger = logging.getLogger(__name__)

Phase = Literal["pre", "post"]
LOCK_TIMEOUT_MS: Final = 2_000

SQL_IS_VALID: Final[LiteralString] = """
SELECT i.indisvalid
FROM pg_index i
WHERE i.indexrelid = to_regclass($1::text)
"""

SQL_HAS_WRITTEN: Final[LiteralString] = """
SELECT pg_current_xact_id_if_assigned() IS NOT NULL
"""

REQUIRE_JOB: Final = """
DO $$
BEGIN
    IF EXISTS (SELECT FROM background_jobs WHERE name = '{name}' AND finished_ts IS NULL) THEN
        RAISE EXCEPTION 'the background job "{name}" is not done' USING ERRCODE = 'RS003',
            DETAIL = 'run `room-storage jobs`';
    END IF;
END
$$
"""

CHECK_INDEX: Final = """
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_index
        WHERE indexrelid = to_regclass('{name}') AND NOT indisvalid) THEN
        RAISE EXCEPTION 'the index {name} is of a build that was interrupted'
            USING HINT = 'DROP INDEX CONCURRENTLY {name}, '
                'then run this script again from its CREATE INDEX on';
    END IF;
END
$$
"""

JOBS: Final = table("background_jobs", column("name"), column("revision"), column("registered_ts"))
COMPATIBILITY: Final = table("schema_compatibility", column("code_revision"))
NOW: Final[ColumnElement[int]] = literal_column(
    "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
)


# ------------------------------------------------------------------------------------------------
# for revisions


def index_concurrently(name: str, definition: str, *, unique: bool = False) -> None:
    """Build an index while others write.

    ``definition`` is the part after its name, `ON events (depth)`. An interrupted build leaves an
    invalid index, which only slows writes down. It is dropped first, with a line in the log; a
    complete one is left alone. So the step can simply run again. This call must be the first thing
    of its step.
    """
    kind = "UNIQUE INDEX" if unique else "INDEX"
    if context.is_offline_mode() and context.get_starting_revision_argument() is None:
        # the script creates the tables as well: they are empty
        op.execute(f"CREATE {kind} {name} {definition}")
        return
    create = f"CREATE {kind} CONCURRENTLY IF NOT EXISTS {name} {definition}"
    migration = op.get_context()
    if not context.is_offline_mode() and _fetched(SQL_HAS_WRITTEN):
        raise CommandError(
            f"the index {name} is built outside of a transaction: give it a step of its own"
        )
    with migration.autocommit_block():
        # a build waits for running transactions, and nobody waits for the build
        op.execute("SET lock_timeout = 0")
        if context.is_offline_mode():
            op.execute(create)
            op.execute(CHECK_INDEX.format(name=name))
        else:
            _build(name, create)
        op.execute(f"SET lock_timeout = {lock_timeout_ms()}")


def _build(name: str, create: str) -> None:
    if _fetched(SQL_IS_VALID, name) is False:
        logger.warning(
            "the index %s was left invalid by a build that was interrupted: "
            "it is dropped and built again",
            name,
        )
        op.execute(f"DROP INDEX CONCURRENTLY {name}")
    op.execute(create)


def background_job(job: Job, revision: str, *, where: LiteralString = "true") -> None:
    """Register a job: `room-storage jobs` runs it while servers run.

    The revision keeps it in its variable `job`. A downgrade forgets it. A row that a downgrade by
    an earlier release has left is replaced.

    ``where``: an SQL condition; if it is false there is nothing to do, for instance on a new
    database.
    """
    left = (JOBS.c.name == literal(job.name)) & (JOBS.c.revision >= literal(revision))
    op.execute(delete(JOBS).where(left))
    row = select(literal(job.name), literal(revision), NOW).where(literal_column(where))
    op.execute(insert(JOBS).from_select(["name", "revision", "registered_ts"], row))


def require_job(job_name: str) -> None:
    """Refuse this step while the job is not done (`MigrationBlocked`)."""
    op.execute(REQUIRE_JOB.format(name=job_name))


def run_script(script: str) -> None:
    """Run a script of many statements. Also offline."""
    if context.is_offline_mode():
        op.get_context().impl.static_output(script)
    else:
        # SQLAlchemy would prepare each statement, so a string of many goes directly to the driver.
        _driver().run_async(lambda driver: driver.execute(script))


def _fetched(sql: LiteralString, *args: object) -> Any:
    """Return the value of a query, in the transaction of the step."""
    return _driver().run_async(lambda driver: driver.fetchval(sql, *args))


def _driver() -> Any:
    """Return the driver's connection below SQLAlchemy."""
    return op.get_bind().connection.dbapi_connection


def lock_timeout_ms() -> int:
    """Return the longest wait of a step for a lock: `-x lock_timeout_ms=…`."""
    return int(setting("lock_timeout_ms") or LOCK_TIMEOUT_MS)


def setting(name: str) -> str | None:
    """Return a setting from `migrate` or `alembic -x name=…`."""
    value = context.config.attributes.get(name) or context.get_x_argument(as_dictionary=True).get(
        name
    )
    return None if value is None else str(value)


# ------------------------------------------------------------------------------------------------
# for env.py


@dataclass(frozen=True, slots=True)
class MigrationStep:
    """A revision: its number, phase, first line, and job."""

    revision: str
    phase: Phase
    title: str
    job: Job | None


def steps_between(
    scripts: ScriptDirectory, current: str | None, target: str
) -> list[MigrationStep]:
    """Return the steps that lead from one revision to another, in order.

    None means an empty database, which gets the schema of HEAD_REVISION in the first step. The
    result is empty if it is at the target or past it.
    """
    # a relative target, as +1, counts from here
    start = current if current and target.startswith("+") else "base"
    steps = [step_of(script.module) for script in scripts.iterate_revisions(target, start)]
    if current is not None:
        return [step for step in reversed(steps) if step.revision > current]
    later = [step for step in reversed(steps[:-1]) if step.revision > HEAD_REVISION]
    return [*steps[-1:], *later]


def upgrade_steps(scripts: ScriptDirectory, current: Any, target: str) -> list[Any]:
    """Return the steps that alembic runs to upgrade.

    An empty database gets the schema of HEAD_REVISION in the first step, which stores that revision
    in the same transaction.
    """
    steps = scripts._upgrade_revs(target, current)  # noqa: SLF001  # that of alembic's command
    if current or not steps:
        return steps
    first = StampStep(
        (), HEAD_REVISION, is_upgrade=True, branch_move=True, revision_map=scripts.revision_map
    )
    first.migration_fn = steps[0].migration_fn
    return [first, *(step for step in steps[1:] if step.revision.revision > HEAD_REVISION)]


def step_of(module: ModuleType) -> MigrationStep:
    """Return the step of a revision; raise `CommandError` if it does not define its phase."""
    phase: Any = getattr(module, "phase", None)
    if phase not in get_args(Phase):
        raise CommandError(
            f"the revision {module.revision} does not define its phase: "
            '`phase: Final[Phase] = "pre"` or "post"'
        )
    return MigrationStep(
        module.revision,
        phase,
        (module.__doc__ or "").strip().split("\n")[0],
        getattr(module, "job", None),
    )


def applied(
    ctx: MigrationContext,
    step: MigrationInfo,
    heads: Collection[Any],  # noqa: ARG001  # alembic's interface
    run_args: Mapping[str, Any],  # noqa: ARG001  # alembic's interface
) -> None:
    """Refuse code that does not know a post step, from the transaction of the step on.

    After a step down, let in the code that the steps left allow, and forget the step's job: it
    would work for a schema that is not there.
    """
    for script in step.up_revisions:
        if not isinstance(script, Script):
            continue
        applied_step = step_of(script.module)
        if not step.is_upgrade and applied_step.job is not None:
            ctx.execute(delete(JOBS).where(JOBS.c.name == literal(applied_step.job.name)))
        if applied_step.phase == "post":
            needed = script.revision if step.is_upgrade else _last_post(step, script)
            ctx.execute(update(COMPATIBILITY).values(code_revision=literal(needed)))


def _last_post(step: MigrationInfo, script: Script) -> str:
    """Return the last post step below one, or the first step of all."""
    below = [
        step_of(lower_script.module)
        for lower_script in step.revision_map.iterate_revisions(str(script.down_revision), "base")
        if isinstance(lower_script, Script)
    ]
    return next(
        (lower_step.revision for lower_step in below if lower_step.phase == "post"),
        below[-1].revision,
    )


def jobs_of(scripts: ScriptDirectory) -> Iterator[Job]:
    for script in scripts.walk_revisions():
        if (job := step_of(script.module).job) is not None:
            yield job
