"""The roles that a database is used under, and what each may: `grants.sql` beside this file says it in full.

They are made, and given their privileges, by migration 0002, where the migrating role may make roles; else it says which statements
somebody has to run who may, and `grant` does the rest. Logins are the operator's: `CREATE ROLE homeserver LOGIN; GRANT room_storage_runtime
TO homeserver`.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any, Final, LiteralString

import asyncpg

from storage.config import Config
from storage.database.session import check_driver, migration_settings
from storage.database.translate import DRIVER_ERRORS, translate
from storage.errors import InputError

logger = logging.getLogger(__name__)

PREFIX: Final = "room_storage"
PREFIX_VARIABLE: Final = "STORAGE_ROLE_PREFIX"
NO_ROLES: Final = "none"
FORM: Final = re.compile(r"[a-z_][a-z0-9_]{0,40}")

SQL_SET_PREFIX: Final[LiteralString] = """
SELECT set_config('room_storage.role_prefix', $1::text, false)
"""


def checked_prefix(given: str | None) -> str:
    """How the roles begin: as given, else STORAGE_ROLE_PREFIX, else "room_storage".

    `InputError` unless it can be part of a name.
    """
    prefix = given or os.environ.get(PREFIX_VARIABLE) or PREFIX
    if not FORM.fullmatch(prefix):
        raise InputError(
            f"{prefix!r} cannot begin the name of a role: small letters, digits and _, at most 41 (or {NO_ROLES!r}: no roles)"
        )
    return prefix


def grants_sql(prefix: str | None = None) -> str:
    """The script that makes the roles and gives them what they may."""
    script = (Path(__file__).parent / "grants.sql").read_text(encoding="utf-8")
    return f"SET room_storage.role_prefix = '{checked_prefix(prefix)}';\n{script}"


async def grant(dsn: str, *, prefix: str | None = None) -> list[str]:
    """Make the roles if need be, and give them exactly what they may; what Postgres warned of.

    As owner of the tables.

    `PermissionRefused`, `DatabaseUnavailable`, `InputError`.
    """
    script, told = grants_sql(prefix), list[str]()

    def listen(_: Any, message: Any) -> None:
        if message.severity_en == "WARNING":
            told.append(f"{message.message} ({message.hint})")

    try:
        settings = migration_settings(Config.from_env().database_schema)
        driver = await asyncpg.connect(
            dsn, server_settings={**settings, "application_name": "room-storage migrate"}
        )
        try:
            driver.add_log_listener(listen)
            await check_driver(driver)
            await driver.execute(script)
        finally:
            await driver.close()
    except (*DRIVER_ERRORS, ValueError) as error:
        raise translate(error, connecting=True) from error
    return told
