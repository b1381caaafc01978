"""How alembic reaches the database: `alembic upgrade head`, with STORAGE_DSN or `-x dsn=…`; `--sql` needs neither.

Online, everything runs in one transaction under an advisory lock, so that two processes that start together do not collide.
"""

import asyncio
import os
from typing import Any, Final

import asyncpg
from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended('room-event-storage migration', 0))"


def _dsn() -> str:
    dsn = context.config.attributes.get("dsn") or context.get_x_argument(as_dictionary=True).get("dsn") or os.environ.get("STORAGE_DSN")
    if not dsn:
        message = "no database: set STORAGE_DSN, or call alembic -x dsn=postgresql://…"
        raise SystemExit(message)
    return str(dsn)


def _run(connection: Connection) -> None:
    context.configure(connection=connection)
    with context.begin_transaction():
        connection.execute(text(LOCK))
        context.run_migrations()


async def _online() -> None:
    dsn = _dsn()

    async def connect(*_: Any, **__: Any) -> Any:
        return await asyncpg.connect(dsn, server_settings={"application_name": "room-storage migrate"})

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_run)
            await connection.commit()
    finally:
        await engine.dispose()


def _offline() -> None:
    context.configure(dialect_name="postgresql", literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    _offline()
else:
    asyncio.run(_online())
