"""Alembic's environment: `alembic upgrade head`, with STORAGE_DSN, STORAGE_DSN_FILE or `-x dsn=…`.

With `--sql` no database is needed. Each step is a separate transaction
(storage/database/migration_steps.py).
A session lock keeps two processes that start together from colliding. A process waits for the lock
by polling outside of a transaction, because an index that is built concurrently would wait for a
waiting transaction.

`-x lock_timeout_ms=2000`: how long a step waits for a lock. `-x role_prefix=room_storage`: the
prefix of the roles, "none" for no roles. `-x database_schema=public`: the schema of the tables,
else STORAGE_DATABASE_SCHEMA.
"""

import asyncio
import logging
import time
from typing import Any, Final

from alembic import context
from alembic.runtime.migration import MigrationContext
from alembic.script.revision import RevisionError
from alembic.util import CommandError
from sqlalchemy import Connection, MetaData
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from storage.config import Config
from storage.database.deployment import checked_prefix, with_prefix
from storage.database.dsn import IN_PROCESS_LIST, DsnServer, environment_dsn, has_password
from storage.database.migrate import (
    current_revision,
    differences,
    is_later,
    later_sentence,
    translated,
)
from storage.database.migration_steps import (
    applied,
    lock_timeout_ms,
    setting,
    steps_between,
    upgrade_steps,
)
from storage.database.session import check_pooling, migration_settings, open_driver
from storage.database.translate import CONNECTING_ERRORS, translate_connecting
from storage.errors import MigrationBlocked, StorageError

logger: logging.Logger = logging.getLogger("storage.database.migration_steps")

TRY_LOCK: Final = "SELECT pg_try_advisory_lock(hashtextextended('room-event-storage migration', 0))"
LOOK_AGAIN_SECONDS: Final = 0.1
WAIT_SECONDS: Final = 600
SESSIONS_END_SECONDS: Final = 3
OLD_WRITERS: Final = """
SELECT w.instance_name
FROM writers w
WHERE w.schema_revision < $1::text
    AND EXISTS (
        SELECT FROM pg_stat_activity a
            WHERE a.datname = current_database()
                AND is_session_of(a.application_name, w.instance_name)
    )
ORDER BY 1
"""
CHECK_ENCODING: Final = """DO $$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'the database has the encoding %, and events need UTF8',
          current_setting('server_encoding')
            USING HINT = 'CREATE DATABASE name ENCODING ''UTF8'' TEMPLATE template0';
    END IF;
END
$$;
"""


def _dsn() -> str:
    dsn = setting("dsn") or environment_dsn()
    if has_password(context.get_x_argument(as_dictionary=True).get("dsn", "")):
        logger.warning(IN_PROCESS_LIST, "-x dsn", "STORAGE_DSN", "STORAGE_DSN")
    if not dsn:
        message = "no database: set STORAGE_DSN or STORAGE_DSN_FILE, or call alembic -x dsn=postgresql://…"
        raise CommandError(message)
    return dsn


def _settings() -> dict[str, str]:
    """Return the session's settings; the step that creates roles reads the role prefix."""
    return {
        "lock_timeout": str(lock_timeout_ms()),
        "room_storage.role_prefix": checked_prefix(setting("role_prefix")),
        **migration_settings(setting("database_schema") or Config.from_env().database_schema),
    }


async def _wait_for_turn(driver: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not await driver.fetchval(TRY_LOCK):
        if time.monotonic() > deadline:
            raise MigrationBlocked(
                f"another process has been migrating this database for {WAIT_SECONDS} s",
                revision="any",
            )
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


def _target() -> str | None:
    """Return the revision to migrate to; None for a command that migrates nothing."""
    try:
        target = context.get_revision_argument()
    except KeyError:  # `alembic current` and `check` have none
        return None
    if isinstance(target, tuple):  # `heads`
        [target] = target
    return target or "base"


def _command() -> str:
    """Return the command of alembic that runs; `migrate` of this package only upgrades."""
    chosen = getattr(context.config.cmd_opts, "cmd", None)
    return str(chosen[0].__name__) if chosen else "upgrade"


async def _refuse_old_writers(driver: Any, current: str, target: str) -> None:
    """Raise `MigrationBlocked` if a pending step must wait for old processes, and one runs."""
    for step in steps_between(context.script, current, target):
        if step.phase == "post" and (old := await _old_writers(driver, step.revision)):
            reason = (
                f"processes of an older release run ({', '.join(old)}): replace them first; "
                f"`room-storage migrate --pre` runs the steps that are possible now"
            )
            raise MigrationBlocked(reason, revision=step.revision)


def _refuse_final_steps(current: str | None, target: str) -> None:
    """Raise `CommandError` if a downgrade would meet a step that cannot be undone."""
    for script in context.script.iterate_revisions(current, target):
        if script.down_revision is None:
            raise CommandError(
                "there is nothing before the first step, and nothing has changed: "
                "drop the database instead"
            )
        if not hasattr(script.module, "downgrade"):
            raise CommandError(
                f"the step {script.revision} cannot be undone: nothing has changed; "
                f"restore a backup that is older than the step"
            )


async def _old_writers(driver: Any, revision: str) -> list[str]:
    """Return the running writers that do not know the revision.

    A writer that has just ended may have left sessions, which Postgres ends in a moment.
    """
    deadline = time.monotonic() + SESSIONS_END_SECONDS
    while True:
        old = [row[0] for row in await driver.fetch(OLD_WRITERS, revision)]
        if not old or time.monotonic() > deadline:
            return old
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


def _nothing(*_: object) -> bool:
    return False


def _compare(migration: MigrationContext, *_: object) -> None:
    """Raise `CommandError` if the database differs from schema.sql.

    alembic calls it for `check`.
    """
    connection: Any = migration.connection
    if found := connection.connection.dbapi_connection.run_async(differences):
        raise CommandError(f"the database differs from schema.sql: {'; '.join(found)}")


def _upgrading() -> dict[str, Any]:
    """Return what alembic runs instead of its own steps, for the command that upgrades."""
    if _command() != "upgrade":
        return {}
    target = _target() or "head"
    return {"fn": lambda current, _: upgrade_steps(context.script, current, target)}


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        transaction_per_migration=True,
        on_version_apply=applied,
        # The schema is SQL: alembic compares no tables of SQLAlchemy, and `_compare` does it.
        target_metadata=MetaData(),
        include_name=_nothing,
        process_revision_directives=_compare,
        **_upgrading(),
    )
    with context.begin_transaction():
        context.run_migrations()


async def _is_ready(driver: Any) -> bool:
    """Wait for the turn of a migration, and return whether there is anything to run."""
    target, command = _target(), _command()
    if target is not None:
        await _wait_for_turn(driver)
    current = await current_revision(driver)
    head = context.script.get_current_head() or ""
    if await is_later(driver, current, head) and command in {"upgrade", "current"}:
        context.config.print_stdout(later_sentence(str(current), head))
        return False
    if command == "downgrade":
        _refuse_final_steps(current, target or "base")
    elif command == "upgrade" and current is not None and target is not None:
        await _refuse_old_writers(driver, current, target)
    return True


async def _online() -> None:
    server = DsnServer(_dsn())

    async def connect(*_: Any, **__: Any) -> Any:
        name = setting("session_name") or "room-storage migrate"
        try:
            opened = await open_driver(server, _settings() | {"application_name": name})
            await check_pooling(server, opened)
        except CONNECTING_ERRORS as error:
            raise translate_connecting(error, server) from error
        opened.driver.add_log_listener(_told)
        return opened.driver

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            if await _is_ready(driver):
                await connection.run_sync(_run)
                await connection.commit()
    finally:
        await engine.dispose()


def _told(_: Any, message: Any) -> None:
    """Log the warnings of a step (RAISE WARNING)."""
    if message.severity_en == "WARNING":
        hint = with_prefix(message.hint or "", setting("role_prefix"))
        logger.warning("%s%s", message.message, f"; {hint}" if hint else "")


def _literal(name: str, value: str) -> str:
    """Quote a value, except a list of names: quoted it would be one name."""
    return value if name == "search_path" else f"'{value}'"


def _offline() -> None:
    context.configure(
        dialect_name="postgresql",
        literal_binds=True,
        transaction_per_migration=True,
        on_version_apply=applied,
        **_upgrading(),
    )
    for name, value in {**_settings(), "client_encoding": "UTF8"}.items():
        context.static_output(f"SET {name} = {_literal(name, value)};\n")
    context.static_output(CHECK_ENCODING)
    with context.begin_transaction():
        context.run_migrations()


def _main() -> None:
    if context.is_offline_mode():
        _offline()
    else:
        asyncio.run(_online())


def _failure(error: Exception) -> str | None:
    """Return the sentence of an error that is no defect of a revision; None for others."""
    if isinstance(error, RevisionError):
        return f"{error}: `alembic history` lists the revisions"
    ours = error if isinstance(error, StorageError) else translated(error)
    return None if ours is None else str(ours)


if context.config.cmd_opts is None:
    _main()
else:  # alembic's own command shows a `CommandError` as a sentence, and others as a traceback
    try:
        _main()
    except CommandError:
        raise
    except Exception as error:
        if (failure := _failure(error)) is None:
            raise
        raise CommandError(failure) from error
