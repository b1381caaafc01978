"""The schema's revision: check it, migrate, print the SQL.

The scripts are alembic's, in `migrations/` of the source or inside the installed package;
`storage/database/migration_steps.py` defines a step. Checking does not import alembic, which is
slow to import: the table `alembic_version` holds the one revision.

This package serves the schemas from OLDEST_REVISION to HEAD_REVISION. It also serves later ones
until a "post" step that ends the support of its release (`schema_compatibility`). Revisions are
numbers of four digits, so that they compare as text. Release 0.3.0 has begun them again, with one
step that creates the schema. It stores BASELINE as the comment of `alembic_version`. A database
without it is of release 0.2.0 or earlier. It is refused: an export leads from there to a new one.
"""

import asyncio
import io
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple, Protocol

from storage.config import Config
from storage.database.connection import Connection, Database
from storage.database.deployment import SQL_WHERE
from storage.database.translate import DRIVER_ERRORS, translate
from storage.errors import (
    DatabaseConflict,
    DatabaseError,
    InputError,
    MigrationBlocked,
    SchemaOutOfDate,
    SchemaTooNew,
    StorageError,
)

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

    from storage.database.migration_steps import MigrationStep

HEAD_REVISION: Final = "0002"
"""The latest that this package knows, and that of schema.sql; `migrate` migrates to it."""

OLDEST_REVISION: Final = "0001"
"""The oldest that this package can serve: it needs nothing later."""

BASELINE: Final = "baseline 0.3.0"
"""The comment of `alembic_version` in each database whose first step was that of this release."""

ONE_CONNECTION: Final = Config(pool_size_max=1, instance_name="migrate")
"""No writer has this name, so that a migration does not count as a live writer."""

JOB_WAITING: Final = "RS003"
"""SQLSTATE of a step whose background job is not done (storage/database/migration_steps.py)."""

SQL_HAS_REVISION: Final[LiteralString] = "SELECT to_regclass('alembic_version') IS NOT NULL"
SQL_REVISION: Final[LiteralString] = "SELECT version_num FROM alembic_version"
SQL_BASELINE: Final[LiteralString] = (
    "SELECT obj_description(to_regclass('alembic_version'), 'pg_class')"
)
SQL_END_SESSION: Final[LiteralString] = """
SELECT count(pg_terminate_backend(pid))
FROM pg_stat_activity
WHERE datname = current_database() AND application_name = $1::text
"""
SQL_BLOCKERS: Final[LiteralString] = """
SELECT DISTINCT b.pid, b.application_name, b.usename::text AS role, b.state
FROM pg_stat_activity m
CROSS JOIN LATERAL unnest(pg_blocking_pids(m.pid)) AS blocking (pid)
JOIN pg_stat_activity b ON b.pid = blocking.pid
WHERE m.datname = current_database() AND m.application_name = $1::text
ORDER BY b.pid
"""
SQL_ROLE: Final[LiteralString] = "SELECT session_user::text"
SQL_SCHEMA_IS_THERE: Final[LiteralString] = """
SELECT to_regnamespace(current_setting('search_path')) IS NOT NULL
"""
SQL_HAD_WRITER: Final[LiteralString] = "SELECT EXISTS (SELECT FROM writers)"
SQL_NEEDED: Final[LiteralString] = "SELECT code_revision FROM schema_compatibility"

END_SECONDS: Final = 0.1
"""A migration that is cancelled may not have its session yet: look for it this often."""

BLOCKERS_POLL_SECONDS: Final = 0.5
"""How often to look for the sessions that a step waits for."""

_ALEMBIC_LOCK: Final = threading.Lock()
"""alembic keeps the running migration in module globals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationOptions:
    """Options of a migration. None: from the environment or the defaults."""

    lock_timeout_ms: int | None = None
    database_schema: str | None = None
    role_prefix: str | None = None
    scripts: Path | None = None
    session_name: str = "room-storage migrate"


class BlockerRow(NamedTuple):
    """A session that a step waits for. ``state`` None: of another role, whose state is hidden."""

    pid: int
    application_name: str | None
    role: str | None
    state: str | None


class Queries(Protocol):
    """A connection of `Database`, or of the driver."""

    async def fetchval(self, sql: str, /) -> Any:
        """Return the first column of the first row, or None."""


async def check_schema(conn: Connection) -> None:
    """Raise `SchemaOutOfDate` or `SchemaTooNew` unless this package can serve the database."""
    revision = await current_revision(conn)
    await is_later(conn, revision, HEAD_REVISION)
    if revision is None or revision < OLDEST_REVISION:
        where = await conn.fetchval(SQL_WHERE)
        raise SchemaOutOfDate(found=revision, wanted=HEAD_REVISION, where=where)


async def is_later(conn: Queries, revision: str | None, head: str) -> bool:
    """Return whether a later release than that of ``head`` has migrated the database.

    Raise `SchemaTooNew` if a "post" step of it has ended the support of that of ``head``, and
    `SchemaOutOfDate` for a database of release 0.2.0 or earlier.
    """
    if revision is not None and await conn.fetchval(SQL_BASELINE) != BASELINE:
        where = await conn.fetchval(SQL_WHERE)
        raise SchemaOutOfDate(found=revision, wanted=head, rewritten=True, where=where)
    if revision is None or revision <= head:
        return False
    needed: str = await conn.fetchval(SQL_NEEDED)
    if needed > head:
        raise SchemaTooNew(found=revision, wanted=head, needed=needed)
    return True


def later_sentence(revision: str, head: str) -> str:
    """Return the sentence for a later schema that the release of ``head`` can serve."""
    return (
        f"nothing to do: the schema is {revision}, of a later release; "
        f"this release has the revisions to {head}, and can serve it"
    )


def left_sentence(revision: str) -> str:
    """Return the sentence for a database in which only the steps before a "post" one have run."""
    serves = "also serves" if revision >= OLDEST_REVISION else "cannot serve"
    return (
        f"the next step needs `room-storage migrate` while no process of an older release runs; "
        f"this release {serves} the database before it"
    )


async def current_revision(conn: Queries) -> str | None:
    """Return the revision of the database; None if it was never migrated."""
    if not await conn.fetchval(SQL_HAS_REVISION):
        return None
    revision: str | None = await conn.fetchval(SQL_REVISION)
    return revision


async def migrate(
    dsn: str, *, revision: str = "head", how: MigrationOptions | None = None
) -> str | None:
    """Run `alembic upgrade` on the database; return the revision afterwards.

    Several processes may do so at once. Where a later release has migrated the database, there is
    nothing to do; raise `SchemaTooNew` if this one cannot serve it. Raise `SchemaOutOfDate` for a
    database of release 0.2.0 or earlier. A new database gets the schema of HEAD_REVISION at once.

    Each step is a transaction of its own: where one fails, those before it stay done. Raise
    `DatabaseConflict` where one has waited too long for a lock, `MigrationBlocked` where it may not
    be run yet, and other `DatabaseError`s. In each case the same call continues from there.
    """
    async with await _opened(dsn, how) as database:
        async with database.connection() as conn:
            current, role = await current_revision(conn), await conn.fetchval(SQL_ROLE)
            if await is_later(conn, current, _head(how)):
                return current
        blockers = list[BlockerRow]()
        try:
            await _upgraded(database, dsn, revision, how or MigrationOptions(), blockers)
        except Exception as error:
            ours = translated(error, role)
            if ours is None:
                raise
            async with database.connection() as conn:
                raise _with_advice(ours, await current_revision(conn), blockers) from error
        async with database.connection() as conn:
            return await current_revision(conn)


async def migrate_before(dsn: str, *, how: MigrationOptions | None = None) -> str | None:
    """Run the steps up to the first "post" one; return the revision afterwards.

    They can run while processes of the release before are live.
    """
    current, steps = await current_and_pending(dsn, how=how)
    first_post = next((at for at, step in enumerate(steps) if step.phase == "post"), len(steps))
    if first_post == 0:
        return current
    return await migrate(dsn, revision=steps[first_post - 1].revision, how=how)


async def had_writer(dsn: str, *, how: MigrationOptions | None = None) -> bool:
    """Return whether a process has ever opened the database to write: it registers first.

    If not, all steps are safe: no process of an older release needs anything of the schema. Raise
    `SchemaTooNew`.
    """
    async with await _opened(dsn, how) as database, database.connection() as conn:
        current = await current_revision(conn)
        await is_later(conn, current, _head(how))
        return current is not None and bool(await conn.fetchval(SQL_HAD_WRITER))


async def pending(dsn: str, *, how: MigrationOptions | None = None) -> "list[MigrationStep]":
    """Return the steps that `migrate` would run, in order."""
    return (await current_and_pending(dsn, how=how))[1]


async def current_and_pending(
    dsn: str, *, how: MigrationOptions | None = None
) -> "tuple[str | None, list[MigrationStep]]":
    """Return the revision of the database, and the steps that `migrate` would run."""
    from storage.database.migration_steps import steps_between  # noqa: PLC0415  # alembic is slow to import

    async with await _opened(dsn, how) as database, database.connection() as conn:
        current = await current_revision(conn)
        await is_later(conn, current, _head(how))
    scripts = script_directory((how or MigrationOptions()).scripts)
    return current, steps_between(scripts, current, "head")


def migration_sql(revision: str = "head", *, how: MigrationOptions | None = None) -> str:
    """Return the statements that `migrate` would run on an empty database, as one script for psql.

    `0001:0002` gives those between two revisions.
    """
    return _run_alembic(revision, sql=True, dsn=None, how=how or MigrationOptions())


def script_directory(scripts: Path | None = None) -> "ScriptDirectory":
    """Return alembic's view of the scripts."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415  # alembic is slow to import

    return ScriptDirectory(str(scripts or scripts_directory()))


def scripts_directory() -> Path:
    """Return the folder of the migration scripts.

    It is in the package if that was installed from a wheel, else in the source tree.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


async def _opened(dsn: str, how: MigrationOptions | None) -> Database:
    """Open one connection with the settings of the steps. Raise `InputError` without a schema."""
    schema = (how or MigrationOptions()).database_schema or Config.from_env().database_schema
    database = await Database.open(dsn, config=replace(ONE_CONNECTION, database_schema=schema))
    try:
        await _check_schema_exists(database, schema)
    except BaseException:
        await database.close()
        raise
    return database


async def _check_schema_exists(database: Database, schema: str) -> None:
    async with database.connection() as conn:
        if not await conn.fetchval(SQL_SCHEMA_IS_THERE):
            quoted = schema.replace('"', '""')
            raise InputError(
                f"the database has no schema {schema!r}: create it with CREATE SCHEMA "
                f'"{quoted}", or correct database_schema (STORAGE_DATABASE_SCHEMA)'
            )


def _head(how: MigrationOptions | None) -> str:
    return script_directory((how or MigrationOptions()).scripts).get_current_head() or ""


async def _upgraded(
    database: Database,
    dsn: str,
    revision: str,
    how: MigrationOptions,
    blockers: list[BlockerRow],
) -> None:
    """Run alembic, which has an event loop of its own, in a thread.

    A cancellation ends the session of the migration, and waits for the thread. Only the step that
    runs is lost. ``blockers`` becomes the sessions that a step has last waited for.
    """
    how = replace(how, session_name=f"room-storage migrate {secrets.token_hex(4)}")
    upgrading = asyncio.create_task(asyncio.to_thread(_upgrade, dsn, revision, how))
    try:
        while not upgrading.done():
            await asyncio.wait([upgrading], timeout=BLOCKERS_POLL_SECONDS)
            if not upgrading.done():
                async with database.connection() as conn:
                    rows = await conn.fetch(SQL_BLOCKERS, how.session_name, row=BlockerRow)
                blockers[:] = rows or blockers
        upgrading.result()
    except asyncio.CancelledError:
        while not upgrading.done():
            async with database.connection() as conn:
                await conn.fetchval(SQL_END_SESSION, how.session_name)
            await asyncio.wait([upgrading], timeout=END_SECONDS)
        upgrading.exception()  # its session was ended
        raise


def _upgrade(dsn: str, revision: str, how: MigrationOptions) -> None:
    _run_alembic(revision, sql=False, dsn=dsn, how=how)


def _run_alembic(revision: str, *, sql: bool, dsn: str | None, how: MigrationOptions) -> str:
    """Run `alembic upgrade` with the scripts in their folder; return its output."""
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
        session_name=how.session_name,
    )
    with _ALEMBIC_LOCK:
        command.upgrade(config, revision, sql=sql)
    return output.getvalue()


def translated(error: BaseException | None, role: str = "") -> DatabaseError | None:
    """Find the driver's error below SQLAlchemy's and return our error for it.

    None if there is none. ``role`` is that of the session.
    """
    while error is not None:
        if isinstance(error, DRIVER_ERRORS):
            ours: Any = translate(error, closed=True, role=role)
            return ours if isinstance(ours, DatabaseError) else None
        error = error.__cause__ or error.__context__
    return None


def _with_advice(
    error: DatabaseError, current: str | None, blockers: Sequence[BlockerRow]
) -> StorageError:
    """Return the same error, with the state of the migration and what to do."""
    if error.sqlstate == JOB_WAITING:
        return MigrationBlocked(
            f"{error.reason}; the schema is {current} now", revision=f"after {current}"
        )
    stands = f"the schema is {current or 'absent'} now, run the migration again to go on from there"
    if isinstance(error, DatabaseConflict):
        sessions = ", ".join(
            f"session {blocker.pid} ({blocker.application_name!r} of role {blocker.role}"
            f"{'' if blocker.state is None else ', ' + blocker.state})"
            for blocker in blockers
        )
        stands += (
            ", when no long transactions have the locks that the step needs "
            f"({f'now {sessions}; ' if sessions else ''}see pg_stat_activity), "
            "or with a larger --lock-timeout-ms"
        )
    return type(error)(f"{error.reason}; {stands}", sqlstate=error.sqlstate)


# --------------------------------------------------------------------------------------------------
# Compare the schema of a database with schema.sql, for `alembic check`.
#
# It runs schema.sql in a schema of its own, in a transaction that it rolls back. So one Postgres
# has made both, and the role needs the privilege CREATE on the database. It compares tables,
# columns, constraints, indexes, sequences, functions, triggers and views, and no comments,
# privileges or rows. Further tables, indexes and functions are the operator's own, and are not
# reported. A further column, constraint or trigger of one of our tables is.

ON_TABLES: Final = ("column", "constraint", "trigger")
"""Kinds whose additional objects change how the tables work."""

SCRATCH: Final = "room_storage_check"

SQL_CATALOGUE: Final[LiteralString] = """
WITH
relation AS (
    SELECT c.oid, c.relname, c.relkind, c.reloptions
    FROM pg_class c
    WHERE c.relnamespace = to_regnamespace(quote_ident(current_schema()))
        AND c.relname NOT LIKE 'alembic_version%'
)
SELECT 'table' AS kind, r.relname::text AS name, format('%s %s', r.relkind, r.reloptions) AS text
FROM relation r
WHERE r.relkind IN ('r', 'p', 'v', 'm')
UNION ALL
SELECT 'column', format('%s.%s', r.relname, a.attname), format('%s %s %s %s %s %s',
    format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attcollation::regcollation, a.attstorage,
    a.attidentity, pg_get_expr(d.adbin, d.adrelid))
FROM relation r
JOIN pg_attribute a ON a.attrelid = r.oid
LEFT JOIN pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum
WHERE r.relkind IN ('r', 'p', 'v', 'm') AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT 'constraint', format('%s.%s', r.relname, c.conname), pg_get_constraintdef(c.oid)
FROM relation r
JOIN pg_constraint c ON c.conrelid = r.oid
UNION ALL
-- the name of the table comes with its schema
SELECT 'index', i.relname, format('%s %s %s', r.relname, i.reloptions, x.indisvalid)
    || regexp_replace(pg_get_indexdef(i.oid), '^.*? USING ', ' ')
FROM relation r
JOIN pg_index x ON x.indrelid = r.oid
JOIN pg_class i ON i.oid = x.indexrelid
UNION ALL
SELECT 'sequence', r.relname, format('%s %s %s %s %s %s %s',
    s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcycle, s.seqcache)
FROM relation r
JOIN pg_sequence s ON s.seqrelid = r.oid
UNION ALL
SELECT 'trigger', format('%s.%s', r.relname, t.tgname),
    format('%s %s', t.tgenabled, pg_get_triggerdef(t.oid, true))
FROM relation r
JOIN pg_trigger t ON t.tgrelid = r.oid
WHERE NOT t.tgisinternal
UNION ALL
SELECT 'view', r.relname, pg_get_viewdef(r.oid)
FROM relation r
WHERE r.relkind IN ('v', 'm')
UNION ALL
SELECT 'function', format('%s(%s)', p.proname, pg_get_function_identity_arguments(p.oid)),
    format('%s %s %s %s %s %s %s %s %s %s %s', pg_get_function_arguments(p.oid),
        pg_get_function_result(p.oid), l.lanname, p.provolatile, p.proparallel, p.proisstrict,
        p.prosecdef, p.procost, p.prorows, p.proconfig, p.prosrc)
    || COALESCE(pg_get_function_sqlbody(p.oid), '')
FROM pg_proc p
JOIN pg_language l ON l.oid = p.prolang
WHERE p.pronamespace = to_regnamespace(quote_ident(current_schema())) AND p.prokind <> 'a'
"""


def schema_script() -> str:
    return (Path(__file__).parent / "schema.sql").read_text(encoding="utf-8")


async def differences(driver: Any) -> list[str]:
    """Return how the schema of a session differs from schema.sql; nothing of it stays."""
    current = await _catalogue(driver)
    transaction = driver.transaction()
    await transaction.start()
    try:
        scratch = f"{SCRATCH}_{driver.get_server_pid()}"
        await driver.execute(f"CREATE SCHEMA {scratch}; SET LOCAL search_path TO {scratch}")
        await driver.execute(schema_script())
        expected = await _catalogue(driver)
    finally:
        await transaction.rollback()
    return list(_compared(current, expected))


async def _catalogue(driver: Any) -> dict[tuple[str, str], str]:
    return {(row["kind"], row["name"]): row["text"] for row in await driver.fetch(SQL_CATALOGUE)}


def _compared(
    current: dict[tuple[str, str], str], expected: dict[tuple[str, str], str]
) -> list[str]:
    """Name the objects that are missing, that differ, or that change how a table works."""
    tables = {name for kind, name in expected if kind == "table"}
    lines = []
    for key in sorted(current.keys() | expected.keys()):
        kind, name = key
        if key not in current:
            lines.append(f"{kind} {name} is missing")
        elif key in expected:
            if current[key] != expected[key]:
                lines.append(f"{kind} {name} differs")
        elif kind in ON_TABLES and name.partition(".")[0] in tables:
            lines.append(f"{kind} {name} is not of this release")
    return lines
