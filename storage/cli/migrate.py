"""`room-storage migrate`: bring the schema up, or print the SQL that would."""

from typing import Annotated

import typer

from storage.cli.common import DsnOption, JsonOption, database_dsn, print_values, run
from storage.config import Config
from storage.database.migrate import HEAD_REVISION, migrate, migration_sql


def command(
    dsn: DsnOption = None,
    *,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statements for an empty database instead of running them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring the schema of the database up to what this version needs."""
    if sql:
        typer.echo(migration_sql(), nl=False)
    else:
        print_values({"revision": run(_migrate(dsn, Config.from_env())), "wanted": HEAD_REVISION}, as_json=as_json)


async def _migrate(dsn: str | None, config: Config) -> str | None:
    async with database_dsn(dsn, config) as target:
        return await migrate(target)
