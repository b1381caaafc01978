"""Alembic's environment: `alembic upgrade head`, with STORAGE_DSN or `-x dsn=…`.

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
import os
import time
from typing import Any, Final

import asyncpg
from alembic import context
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from storage.config import Config
from storage.database.migrate import SQL_HAS_REVISION, SQL_REVISION
from storage.database.migration_steps import applied, lock_timeout_ms, setting, steps_between
from storage.database.roles import checked_prefix
from storage.database.session import check_driver, migration_settings
from storage.errors import MigrationBlocked

logger = logging.getLogger("storage.database.migration_steps")

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
    dsn = setting("dsn") or os.environ.get("STORAGE_DSN")
    if not dsn:
        message = "no database: set STORAGE_DSN, or call alembic -x dsn=postgresql://…"
        raise SystemExit(message)
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


async def _refuse_old_writers(driver: Any) -> None:
    """Raise `MigrationBlocked` if a pending step must wait for old processes, and one runs."""
    current = (
        await driver.fetchval(SQL_REVISION) if await driver.fetchval(SQL_HAS_REVISION) else None
    )
    target = context.get_revision_argument()
    if current is None or not isinstance(target, str):
        return
    for step in steps_between(context.script, current, target):
        if step.phase == "post" and (old := await _old_writers(driver, step.revision)):
            reason = (
                f"processes of an older release run ({', '.join(old)}): replace them first; "
                f"`room-storage migrate --pre` runs the steps that are possible now"
            )
            raise MigrationBlocked(reason, revision=step.revision)


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


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection, transaction_per_migration=True, on_version_apply=applied
    )
    with context.begin_transaction():
        context.run_migrations()


async def _online() -> None:
    dsn = _dsn()

    async def connect(*_: Any, **__: Any) -> Any:
        driver = await asyncpg.connect(
            dsn, server_settings=_settings() | {"application_name": "room-storage migrate"}
        )
        driver.add_log_listener(_told)
        await check_driver(driver)
        return driver

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            await _wait_for_turn(driver)
            await _refuse_old_writers(driver)
            await connection.run_sync(_run)
            await connection.commit()
    finally:
        await engine.dispose()


def _told(_: Any, message: Any) -> None:
    """Log the warnings of a step (RAISE WARNING)."""
    if message.severity_en == "WARNING":
        logger.warning("%s%s", message.message, f"\n{message.hint}" if message.hint else "")


def _literal(name: str, value: str) -> str:
    """Quote a value, except a list of names: quoted it would be one name."""
    return value if name == "search_path" else f"'{value}'"


def _offline() -> None:
    context.configure(
        dialect_name="postgresql",
        literal_binds=True,
        transaction_per_migration=True,
        on_version_apply=applied,
    )
    for name, value in {**_settings(), "client_encoding": "UTF8"}.items():
        context.static_output(f"SET {name} = {_literal(name, value)};\n")
    context.static_output(CHECK_ENCODING)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    _offline()
else:
    asyncio.run(_online())
