"""Where the demonstration stores its rooms: never where other data lies.

Without a DSN it uses the embedded Postgres with the folder `demo` below the usual data folder. With
a DSN it uses the schema `room_storage_demo` of that database. A database is for one homeserver, and
the demonstration's is s1.test. So it does not claim the database of the quick start, or of a real
server. STORAGE_DATABASE_SCHEMA names another schema.
"""

import os
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from storage.cli.places import described
from storage.config import Config
from storage.database.connection import Database
from storage.database.embedded import data_directory, embedded_postgres

FOLDER: Final = "demo"
SCHEMA: Final = "room_storage_demo"
SCHEMA_VARIABLE: Final = "STORAGE_DATABASE_SCHEMA"
CREATE_SCHEMA: Final = "CREATE SCHEMA IF NOT EXISTS room_storage_demo"


class DemoPlace(NamedTuple):
    """An open database for the demonstration.

    ``about``: where the data lies. ``settings``: the line of a shell with which other commands find
    it. ``removal``: the command that deletes it.
    """

    dsn: str
    config: Config
    about: str
    settings: str
    removal: str


@asynccontextmanager
async def demo_place(
    dsn: str | None, config: Config, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[DemoPlace]:
    """Open the place for the demonstration; create it if it does not exist."""
    if dsn is None:
        folder = (data_directory(environ) / FOLDER).absolute()
        async with embedded_postgres(folder, config=config) as embedded:
            yield _in_folder(embedded, config, folder)
        return
    if SCHEMA_VARIABLE not in environ:
        async with (
            await Database.open(dsn, config=replace(config, pool_size_max=1)) as database,
            database.connection() as conn,
        ):
            await conn.execute(CREATE_SCHEMA)
        config = replace(config, database_schema=SCHEMA)
    yield _in_database(dsn, config, environ)


def _in_folder(dsn: str, config: Config, folder: Path) -> DemoPlace:
    quoted = shlex.quote(str(folder))
    return DemoPlace(
        dsn,
        config,
        f"{folder} (embedded Postgres)",
        f"export STORAGE_DATA_DIR={quoted}",
        f"rm -r {quoted}",
    )


def _in_database(dsn: str, config: Config, environ: Mapping[str, str]) -> DemoPlace:
    schema = config.database_schema
    variables = [f"{SCHEMA_VARIABLE}={shlex.quote(schema)}"]
    if environ.get("STORAGE_DSN") != dsn:
        # a password is not printed
        shown = '"…the DSN that you gave…"' if urlsplit(dsn).password else shlex.quote(dsn)
        variables.insert(0, f"STORAGE_DSN={shown}")
    drop = shlex.quote(f'DROP SCHEMA "{schema}" CASCADE')
    return DemoPlace(
        dsn,
        config,
        f"database {described(dsn, schema)}",
        "export " + " ".join(variables),
        f'psql "$STORAGE_DSN" -c {drop}',
    )
