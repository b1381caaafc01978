"""The schema's revision: check it, bring it up, print the SQL that would.

The scripts are alembic's, in `migrations/` of the source or inside the installed package;
`storage/database/steps.py` says what a step is. Checking needs no alembic, which takes long to
import: the table `alembic_version` holds the one revision.

This package serves the schemas from OLDEST_REVISION to HEAD_REVISION, and later ones as long as no
step has been taken that is for after the last process of its kind (`schema_compatibility`).
Revisions are numbers of four digits, so that they compare as text. Until the first release the
first migration is rewritten. So it leaves its digest, as the comment of `alembic_version`: a
database that another form of it has made is refused, as it may lack any column.
"""

import asyncio
import functools
import io
import threading
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, LiteralString

from storage.config import Config
from storage.database.connection import Connection, Database
from storage.database.translate import DRIVER_ERRORS, translate
from storage.errors import (
    DatabaseConflict,
    DatabaseError,
    MigrationBlocked,
    SchemaOutOfDate,
    SchemaTooNew,
    StorageError,
)

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

    from storage.database.steps import MigrationStep

HEAD_REVISION: Final = "0010"
"""The latest that this package knows, at which `migrate` arrives."""

OLDEST_REVISION: Final = "0010"
"""The oldest that it can serve: it needs nothing that came later."""

ONE_CONNECTION: Final = Config(pool_size_max=1, instance_name="migrate")
"""No writer has this name: that a migration looks at the revision does not make one count as alive.
"""

JOB_WAITING: Final = "RS003"
"""SQLSTATE of a step whose background job is not done (storage/database/steps.py)."""

SQL_HAS_REVISION: Final[LiteralString] = "SELECT to_regclass('alembic_version') IS NOT NULL"
SQL_REVISION: Final[LiteralString] = "SELECT version_num FROM alembic_version"
SQL_FIRST: Final[LiteralString] = (
    "SELECT obj_description(to_regclass('alembic_version'), 'pg_class')"
)
SQL_NEEDED: Final[LiteralString] = "SELECT code_revision FROM schema_compatibility"

_ONE_AT_A_TIME: Final = threading.Lock()
"""alembic keeps the running migration in module globals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationOptions:
    """Of a migration. None: as the environment or the defaults have it."""

    lock_timeout_ms: int | None = None
    database_schema: str | None = None
    role_prefix: str | None = None
    scripts: Path | None = None


async def check_schema(conn: Connection) -> None:
    """`SchemaOutOfDate` or `SchemaTooNew` unless this package can serve the database."""
    found = await current_revision(conn)
    if found is None or found < OLDEST_REVISION:
        raise SchemaOutOfDate(found=found, wanted=HEAD_REVISION)
    if found > HEAD_REVISION:
        needed: str = await conn.fetchval(SQL_NEEDED)
        if needed > HEAD_REVISION:
            raise SchemaTooNew(found=found, wanted=HEAD_REVISION, needed=needed)
    if await conn.fetchval(SQL_FIRST) != first_schema(scripts_directory()):
        raise SchemaOutOfDate(found=found, wanted=HEAD_REVISION, rewritten=True)


@functools.cache
def first_schema(scripts: Path) -> str:
    """What the first migration leaves in the database: a digest of its own SQL."""
    return "first schema " + first_digest(scripts)


def first_digest(scripts: Path) -> str:
    """64 hexadecimal digits."""
    return sha256((scripts / "versions" / "0001_initial.sql").read_bytes()).hexdigest()


async def current_revision(conn: Connection) -> str | None:
    """The revision the database is at; None if it was never migrated."""
    if not await conn.fetchval(SQL_HAS_REVISION):
        return None
    revision: str | None = await conn.fetchval(SQL_REVISION)
    return revision


async def migrate(
    dsn: str, *, revision: str = "head", how: MigrationOptions | None = None
) -> str | None:
    """`alembic upgrade` on the database; the revision it is at afterwards.

    Several processes may do so at once.

    Each step is a transaction of its own: where one fails, those before it stay done.
    `DatabaseConflict` where one has waited too long for a lock, `MigrationBlocked` where it may not
    be taken yet, other `DatabaseError`s; in each case the same call goes on from there.
    """
    async with await _opened(dsn, how) as database:
        try:
            await asyncio.to_thread(
                _upgrade, dsn, revision, how or MigrationOptions()
            )  # alembic runs an event loop of its own
        except Exception as error:
            told = _translated(error)
            if told is None:
                raise
            async with database.connection() as conn:
                raise _with_advice(told, await current_revision(conn)) from error
        async with database.connection() as conn:
            return await current_revision(conn)


async def migrate_before(dsn: str, *, how: MigrationOptions | None = None) -> str | None:
    """What can be done while processes of the release before are at work: the steps up to the first "post" one; the revision afterwards."""
    steps = await pending(dsn, how=how)
    first_post = next((at for at, step in enumerate(steps) if step.phase == "post"), len(steps))
    if first_post == 0:
        async with await _opened(dsn, how) as database, database.connection() as conn:
            return await current_revision(conn)
    return await migrate(dsn, revision=steps[first_post - 1].revision, how=how)


async def pending(dsn: str, *, how: MigrationOptions | None = None) -> "list[MigrationStep]":
    """The steps that `migrate` would take, in order."""
    from storage.database.steps import steps_between  # noqa: PLC0415  # alembic is slow to import

    async with await _opened(dsn, how) as database, database.connection() as conn:
        current = await current_revision(conn)
    return steps_between(script_directory((how or MigrationOptions()).scripts), current, "head")


def migration_sql(revision: str = "head", *, how: MigrationOptions | None = None) -> str:
    """The statements that `migrate` would run on an empty database, or between two revisions (`0001:0002`), as one script for psql."""
    return _run_alembic(revision, sql=True, dsn=None, how=how or MigrationOptions())


def script_directory(scripts: Path | None = None) -> "ScriptDirectory":
    """Alembic's view of the scripts."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415  # alembic is slow to import

    return ScriptDirectory(str(scripts or scripts_directory()))


def scripts_directory() -> Path:
    """Where the migration scripts are: in the package if it was installed from a wheel, else in the source tree."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


async def _opened(dsn: str, how: MigrationOptions | None) -> Database:
    """One connection, as the steps have it."""
    schema = (how or MigrationOptions()).database_schema or Config.from_env().database_schema
    return await Database.open(dsn, config=replace(ONE_CONNECTION, database_schema=schema))


def _upgrade(dsn: str, revision: str, how: MigrationOptions) -> None:
    _run_alembic(revision, sql=False, dsn=dsn, how=how)


def _run_alembic(revision: str, *, sql: bool, dsn: str | None, how: MigrationOptions) -> str:
    """`alembic upgrade`, with the scripts where they are; what it printed."""
    from alembic import command  # noqa: PLC0415  # slow to import, and rarely needed
    from alembic.config import Config as AlembicConfig  # noqa: PLC0415

    output = io.StringIO()
    config = AlembicConfig(output_buffer=output)
    config.set_main_option(
        "script_location", str(how.scripts or scripts_directory()).replace("%", "%%")
    )
    config.attributes.update(
        dsn=dsn,
        lock_timeout_ms=how.lock_timeout_ms,
        database_schema=how.database_schema,
        role_prefix=how.role_prefix,
    )
    with _ONE_AT_A_TIME:
        command.upgrade(config, revision, sql=sql)
    return output.getvalue()


def _translated(error: BaseException | None) -> DatabaseError | None:
    """Our error for that of the driver below what SQLAlchemy has made of it; None if there is none."""
    while error is not None:
        if isinstance(error, DRIVER_ERRORS):
            told: Any = translate(error, closed=True)
            return told if isinstance(told, DatabaseError) else None
        error = error.__cause__ or error.__context__
    return None


def _with_advice(error: DatabaseError, current: str | None) -> StorageError:
    """The same error, with where the migration stands and what to do."""
    if error.sqlstate == JOB_WAITING:
        return MigrationBlocked(
            f"{error.reason}; the schema is {current} now", revision=f"after {current}"
        )
    stands = f"the schema is {current or 'absent'} now, run the migration again to go on from there"
    if isinstance(error, DatabaseConflict):
        stands += ", when no long transactions hold what the step needs (pg_stat_activity tells), or with a larger --lock-timeout-ms"
    return type(error)(f"{error.reason}; {stands}", sqlstate=error.sqlstate)
