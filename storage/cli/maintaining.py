"""A database for maintenance: two connections, statements of up to an hour, the current schema."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Final

from storage.cli.common import database_dsn
from storage.config import Config
from storage.database.archive_limits import MAINTENANCE_MS
from storage.database.connection import Database
from storage.database.embedded import naming_folder
from storage.database.migrate import check_schema

STATEMENT_TIMEOUT_MS: Final = 3_600_000
INSTANCE_NAME: Final = "command line"
"""No writer has this name, so a running command does not make a writer count as alive."""


@asynccontextmanager
async def maintained(dsn: str | None) -> AsyncIterator[Database]:
    """Open the database of the DSN, or the embedded one. Raise `SchemaOutOfDate`."""
    config = replace(
        Config.from_env(),
        statement_timeout_ms=STATEMENT_TIMEOUT_MS,
        archive_timeout_ms=MAINTENANCE_MS,
        pool_size_max=2,
        instance_name=INSTANCE_NAME,
    )
    naming = naming_folder(config.database_schema) if dsn is None else nullcontext()
    async with (
        database_dsn(dsn, config) as target,
        await Database.open(target, config=config) as database,
    ):
        async with database.connection() as conn:
            with naming:
                await check_schema(conn)
        yield database
