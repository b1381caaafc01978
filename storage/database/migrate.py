"""The schema's revision: check it, bring it up, print the SQL that would.

The scripts are alembic's, in `migrations/` of the source or inside the installed package. Checking needs no alembic, which takes
long to import: the table `alembic_version` holds the one revision, and HEAD_REVISION names the one this package needs.
"""

import asyncio
import io
import threading
from pathlib import Path
from typing import Final

from storage.config import Config
from storage.database.connection import Connection, Database
from storage.errors import SchemaOutOfDate

HEAD_REVISION: Final = "0001"

SQL_HAS_REVISION: Final = "SELECT to_regclass('alembic_version') IS NOT NULL"
SQL_REVISION: Final = "SELECT version_num FROM alembic_version"

_ONE_AT_A_TIME: Final = threading.Lock()
"""alembic keeps the running migration in module globals."""


async def check_schema(conn: Connection) -> None:
    """`SchemaOutOfDate` unless the database is at HEAD_REVISION."""
    found = await current_revision(conn)
    if found != HEAD_REVISION:
        raise SchemaOutOfDate(found=found, wanted=HEAD_REVISION)


async def current_revision(conn: Connection) -> str | None:
    """The revision the database is at; None if it was never migrated."""
    if not await conn.fetchval(SQL_HAS_REVISION):
        return None
    revision: str | None = await conn.fetchval(SQL_REVISION)
    return revision


async def migrate(dsn: str, *, revision: str = "head") -> str | None:
    """`alembic upgrade` on the database; the revision it is at afterwards. Several processes may do so at once."""
    async with await Database.open(dsn, config=Config(pool_size_max=1)) as database:
        await asyncio.to_thread(_upgrade, dsn, revision)  # alembic runs an event loop of its own
        async with database.connection() as conn:
            return await current_revision(conn)


def migration_sql(revision: str = "head") -> str:
    """The statements that `migrate` would run on an empty database, as one script with its transaction."""
    return _run_alembic(revision, sql=True, dsn=None)


def scripts_directory() -> Path:
    """Where the migration scripts are: in the package if it was installed from a wheel, else in the source tree."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def _upgrade(dsn: str, revision: str) -> None:
    _run_alembic(revision, sql=False, dsn=dsn)


def _run_alembic(revision: str, *, sql: bool, dsn: str | None) -> str:
    """`alembic upgrade`, with the scripts where they are; what it printed."""
    from alembic import command  # noqa: PLC0415  # slow to import, and rarely needed
    from alembic.config import Config as AlembicConfig  # noqa: PLC0415

    output = io.StringIO()
    config = AlembicConfig(output_buffer=output)
    config.set_main_option("script_location", str(scripts_directory()).replace("%", "%%"))
    config.attributes["dsn"] = dsn
    with _ONE_AT_A_TIME:
        command.upgrade(config, revision, sql=sql)
    return output.getvalue()
