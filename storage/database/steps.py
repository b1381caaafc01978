"""What a revision in `migrations/versions` is made of: its phase, indexes built beside running servers, long work put off.

    revision, down_revision = "0004", "0003"
    phase: Final[Phase] = "pre"
    job: Final = Job("fill topics", batch=SQL_FILL, expected=SQL_COUNT)

    def upgrade() -> None:
        op.execute("ALTER TABLE events ADD COLUMN topic text")
        background_job(job, revision)

Phases. A "pre" step leaves everything as the code of the release before needs it: it adds what that code does not look at. It runs while
old processes are at work. A "post" step takes away what only they needed; it is refused while one of them lives, and from then on code
that does not know the step is refused. So a release is: `room-storage migrate --pre`, new processes for old ones, `room-storage migrate`.

Each step is a transaction of its own with a short lock_timeout: a step that waits for a lock makes everybody wait who comes after it.
An index is a step of its own, as Postgres builds it outside of a transaction. Data are never changed by the row in a step: that is a
`Job` (storage/database/background.py).

This module is imported by revisions only: it needs alembic.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal, LiteralString, get_args

from alembic import context, op
from alembic.runtime.migration import MigrationContext, MigrationInfo
from alembic.script import Script, ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import ColumnElement, column, insert, literal, literal_column, select, table, update

logger = logging.getLogger(__name__)

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
            USING HINT = 'DROP INDEX CONCURRENTLY {name}, then run this script again from its CREATE INDEX on';
    END IF;
END
$$
"""

JOBS: Final = table("background_jobs", column("name"), column("revision"), column("registered_ts"))
COMPATIBILITY: Final = table("schema_compatibility", column("code_revision"))
NOW: Final[ColumnElement[int]] = literal_column(
    "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
)


@dataclass(frozen=True, slots=True)
class Job:
    """Long work on data, in batches.

    ``batch``: one statement, given the place after which it begins ($1::bigint, at first 0) and how
    many rows it may take ($2::int); it answers with one row: how many it took (rows), and the place
    of the last one (place, NULL at the end). What it does must do no harm when it is done again.
    ``expected``: a query for the number of rows, about.
    """

    name: str
    batch: LiteralString
    expected: LiteralString | None = None


# ---------------------------------------------------------------------------------------------------------
# for revisions


def index_concurrently(name: str, definition: str, *, unique: bool = False) -> None:
    """Build an index while others write: ``definition`` is what stands after its name, `ON events (depth)`.

    What a build that was interrupted has left (an index that is invalid, and slows writes down for nothing) is dropped first, with a line
    in the log; one that is complete is left alone. So the step is simply run again. It must be the first thing of its step.
    """
    kind = "UNIQUE INDEX" if unique else "INDEX"
    if context.is_offline_mode() and context.get_starting_revision_argument() is None:
        op.execute(
            f"CREATE {kind} {name} {definition}"
        )  # the script makes the tables as well: they are empty
        return
    create = f"CREATE {kind} CONCURRENTLY IF NOT EXISTS {name} {definition}"
    migration = op.get_context()
    if not context.is_offline_mode() and _asked(SQL_HAS_WRITTEN):
        raise CommandError(
            f"the index {name} is built outside of a transaction: give it a step of its own"
        )
    with migration.autocommit_block():
        op.execute(
            "SET lock_timeout = 0"
        )  # a build waits for the transactions under way, and nobody waits for it
        if context.is_offline_mode():
            op.execute(create)
            op.execute(CHECK_INDEX.format(name=name))
        else:
            _build(name, create)
        op.execute(f"SET lock_timeout = {lock_timeout_ms()}")


def _build(name: str, create: str) -> None:
    if _asked(SQL_IS_VALID, name) is False:
        logger.warning(
            "the index %s was left invalid by a build that was interrupted: it is dropped and built again",
            name,
        )
        op.execute(f"DROP INDEX CONCURRENTLY {name}")
    op.execute(create)


def background_job(job: Job, revision: str, *, where: LiteralString = "true") -> None:
    """Register a job: `room-storage jobs` does it, beside running servers.

    The revision keeps it in its variable `job`.

    ``where``: an SQL condition, without which there is nothing to do: on a new database, say.
    """
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
        # One string of many statements goes past SQLAlchemy, which prepares each, to the driver.
        _driver().run_async(lambda driver: driver.execute(script))


def _asked(sql: LiteralString, *args: object) -> Any:
    """The value that a query answers with, in the transaction of the step."""
    return _driver().run_async(lambda driver: driver.fetchval(sql, *args))


def _driver() -> Any:
    """What SQLAlchemy has between itself and the driver."""
    return op.get_bind().connection.dbapi_connection


def lock_timeout_ms() -> int:
    """How long a step waits for a lock: `-x lock_timeout_ms=…`."""
    return int(setting("lock_timeout_ms") or LOCK_TIMEOUT_MS)


def setting(name: str) -> str | None:
    """What `migrate` or `alembic -x name=…` has given."""
    given = context.config.attributes.get(name) or context.get_x_argument(as_dictionary=True).get(
        name
    )
    return None if given is None else str(given)


# ------------------------------------------------------------------------------------------------------------
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
    """The steps that lead from one revision to another, in order.

    None: from nothing. Empty if it is there or past it.
    """
    wanted = [step_of(script.module) for script in scripts.iterate_revisions(target, "base")]
    return [step for step in reversed(wanted) if current is None or step.revision > current]


def step_of(module: ModuleType) -> MigrationStep:
    """What a revision says of itself; `CommandError` if it does not say its phase."""
    phase: Any = getattr(module, "phase", None)
    if phase not in get_args(Phase):
        raise CommandError(
            f'the revision {module.revision} does not say its phase: `phase: Final[Phase] = "pre"` or "post"'
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
    """After a step, in its transaction: code that does not know a post step cannot serve this schema any more."""
    for script in step.up_revisions:
        if (
            isinstance(script, Script)
            and step_of(script.module).phase == "post"
            and step.is_upgrade
        ):
            ctx.execute(update(COMPATIBILITY).values(code_revision=literal(script.revision)))


def jobs_of(scripts: ScriptDirectory) -> Iterator[Job]:
    """The jobs of all revisions."""
    for script in scripts.walk_revisions():
        if (job := step_of(script.module).job) is not None:
            yield job
