"""The roles of a database and their privileges; `grants.sql` in this folder has the full list.

Migration 0001 creates them and grants the privileges, where the migrating role may create roles.
Otherwise it prints the statements that an authorised role has to run, and `grant` does the rest.
Logins are the operator's: `CREATE ROLE homeserver LOGIN; GRANT room_storage_runtime TO homeserver`.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any, Final, LiteralString

from storage.config import Config
from storage.database.dsn import DsnServer
from storage.database.session import check_pooling, migration_settings, open_driver
from storage.database.translate import CONNECTING_ERRORS, role_of, translate_connecting
from storage.errors import InputError, PermissionRefused

logger: logging.Logger = logging.getLogger(__name__)

PREFIX: Final = "room_storage"
PREFIX_VARIABLE: Final = "STORAGE_ROLE_PREFIX"
NO_ROLES: Final = "none"
FORM: Final = re.compile(r"[a-z_][a-z0-9_]{0,40}")

NOT_GRANTED: Final = ("01006", "01007")
"""SQLSTATE of the warnings for a role that may not revoke or grant a privilege."""

SQL_SET_PREFIX: Final[LiteralString] = """
SELECT set_config('room_storage.role_prefix', $1::text, false)
"""


def checked_prefix(given: str | None) -> str:
    """Return the prefix of the roles: as given, else STORAGE_ROLE_PREFIX, else "room_storage".

    Raise `InputError` unless it can be part of a name.
    """
    prefix = given or os.environ.get(PREFIX_VARIABLE) or PREFIX
    if not FORM.fullmatch(prefix):
        raise InputError(
            f"{prefix!r} cannot begin the name of a role: small letters, digits and _, "
            f"at most 41 (or {NO_ROLES!r}: no roles)"
        )
    return prefix


def grants_sql(prefix: str | None = None) -> str:
    """Return the script that creates the roles and grants their privileges."""
    return f"SET room_storage.role_prefix = '{checked_prefix(prefix)}';\n{grants_script()}"


def grants_script() -> str:
    """Return grants.sql, which reads the prefix of the roles from the session."""
    return (Path(__file__).parent / "grants.sql").read_text(encoding="utf-8")


def with_prefix(hint: str, prefix: str | None) -> str:
    """Return a hint of the script with the option for the prefix, where that is another one."""
    chosen, command = checked_prefix(prefix), "room-storage migrate --grants"
    return hint if chosen == PREFIX else hint.replace(command, f"{command} --role-prefix {chosen}")


async def grant(dsn: str, *, prefix: str | None = None) -> list[str]:
    """Create the roles if need be, and set exactly their privileges; return Postgres' warnings.

    Connect as owner of the tables.

    Raise `PermissionRefused`, `DatabaseUnavailable` or `InputError`.
    """
    script, server, role = grants_sql(prefix), DsnServer(dsn), ""
    warnings, refused = list[str](), list[str]()

    def listen(_: Any, message: Any) -> None:
        if message.sqlstate in NOT_GRANTED:
            refused.append(message.message)
        elif message.severity_en == "WARNING":
            warnings.append(f"{message.message} ({with_prefix(message.hint or '', prefix)})")

    try:
        settings = migration_settings(Config.from_env().database_schema)
        opened = await open_driver(server, {**settings, "application_name": "room-storage migrate"})
        try:
            role = role_of(opened.driver)
            opened.driver.add_log_listener(listen)
            await check_pooling(server, opened)
            await opened.driver.execute(script)
        finally:
            await opened.driver.close()
    except CONNECTING_ERRORS as error:
        raise translate_connecting(error, server, role=role) from error
    if refused:
        raise PermissionRefused(
            f"{refused[0]}; the role {role} is not the owner of the tables: run it as the owner"
        )
    return warnings
