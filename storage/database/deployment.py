"""The identity of a database: its id, which tokens carry, and the homeserver of its local users.

The first store that opens it sets the name, even if several open at once. Another name is refused
once there are rooms, because the visibility rows are those of the users of the first. Until then a
wrong name can be corrected: a store that opens with another one sets that, if no other process uses
the database. `NO_SERVER` is never stored: an import without a name leaves the choice open.
"""

import asyncio
import logging
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any, Final, LiteralString, NamedTuple

from storage.config import Config
from storage.database.connection import Connection
from storage.database.dsn import DsnServer
from storage.database.placeholders import fill
from storage.database.pool import begun
from storage.database.session import check_pooling, migration_settings, open_driver
from storage.database.translate import CONNECTING_ERRORS, role_of, translate_connecting
from storage.errors import InputError, PermissionRefused, WrongServerName

logger: logging.Logger = logging.getLogger(__name__)

NO_SERVER: Final = "localhost.invalid"
"""A server without users (RFC 2606)."""

NEEDS_NAME: Final = (
    "the database is new: give a server name (--server-name, STORAGE_SERVER_NAME), whose users are "
    "local"
)

SQL_DEPLOYMENT: Final[LiteralString] = """
SELECT deployment_id, server_name
FROM deployment
"""

SQL_WHERE: Final[LiteralString] = """
SELECT format('the database %s (schema %s)', current_database(),
    COALESCE(current_schema(), split_part(current_setting('search_path'), ',', 1))) AS place
"""

SQL_HAS_ROOMS: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM rooms)
"""

SQL_REMEMBER: Final[LiteralString] = """
INSERT INTO deployment (deployment_id, created_ts, server_name)
VALUES ($1::text, $2::bigint, $3::text)
ON CONFLICT (singleton) DO UPDATE SET server_name = EXCLUDED.server_name
WHERE deployment.server_name IS NULL AND EXCLUDED.server_name IS NOT NULL
"""

SQL_READS_NAME: Final[LiteralString] = fill("""
SELECT pg_advisory_xact_lock_shared({LOCK_DEPLOYMENT})
""")
"""Wait for a store that sets another name: it has not seen this session."""

SQL_SETS_NAME: Final[LiteralString] = fill("""
SELECT pg_advisory_xact_lock({LOCK_DEPLOYMENT})
""")

SQL_IS_EMPTY: Final[LiteralString] = """
SELECT NOT EXISTS (SELECT FROM rooms)
    AND NOT EXISTS (SELECT FROM account_data)
    AND NOT EXISTS (SELECT FROM to_device)
    AND NOT EXISTS (SELECT FROM erased_users) AS is_empty
"""

SQL_IN_USE: Final[LiteralString] = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity a
    WHERE a.datname = current_database()
        AND starts_with(a.application_name, 'room-storage ')
        AND a.application_name <> current_setting('application_name')
        AND NOT is_session_of(a.application_name, 'migrate')
)
"""

SQL_RENAME: Final[LiteralString] = """
WITH ended AS (
    -- a process that cannot be seen, as behind a pooler: its writes are refused
    UPDATE stream_positions SET epoch = -1
)
UPDATE deployment
SET server_name = $1::text
"""

RECHECK_SECONDS: Final = 0.02


class Deployment(NamedTuple):
    """A database. ``server_name`` None: no store has been opened in it under a name."""

    deployment_id: str
    server_name: str | None


async def deployment(conn: Connection) -> Deployment | None:
    """Return the identity of the database; None if no store has ever been opened in it."""
    return await conn.fetchrow(SQL_DEPLOYMENT, row=Deployment)


async def settled(
    conn: Connection, server_name: str | None, *, wait_ms: int = 0
) -> tuple[str, str]:
    """Return the id of this database, and the name to open it under.

    The name is the given or the stored one. Runs in autocommit. Raise `WrongServerName` if another
    one is stored, unless the database is empty and nobody else uses it: sessions that are about to
    end get ``wait_ms``. Raise `InputError` if no name is stored or given.
    """
    name = None if server_name == NO_SERVER else server_name
    await conn.execute(SQL_READS_NAME)
    stored = await deployment(conn)
    if stored is None or (stored.server_name is None and name is not None):
        tag = await conn.execute(
            SQL_REMEMBER, secrets.token_hex(8), time.time_ns() // 1_000_000, name
        )
        if name is not None and tag.endswith("1") and await conn.fetchval(SQL_HAS_ROOMS):
            logger.warning(
                "rooms were imported without a server name: run `room-storage verify --repair` "
                "for the users of %s",
                name,
            )
        stored = await deployment(conn)
    if stored is None:
        raise InputError("the identity of the database was not stored: is it being restored?")
    if name is not None and stored.server_name != name:
        await _rename(conn, name, str(stored.server_name), wait_ms)
        return stored.deployment_id, name
    opened = stored.server_name or server_name
    if opened is None:
        raise InputError(NEEDS_NAME)
    return stored.deployment_id, opened


async def _rename(conn: Connection, name: str, stored_name: str, wait_ms: int) -> None:
    """Give an empty database another name. Raise `WrongServerName` if that is impossible."""
    deadline = time.monotonic() + wait_ms / 1000
    while await conn.fetchval(SQL_IS_EMPTY):
        async with begun(conn):
            await conn.execute(SQL_SETS_NAME)
            if await conn.fetchval(SQL_IS_EMPTY) and not await conn.fetchval(SQL_IN_USE):
                await conn.execute(SQL_RENAME, name)
                logger.warning(
                    "the database was empty: it belongs to %s now, not %s", name, stored_name
                )
                return
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(RECHECK_SECONDS)
    raise WrongServerName(name, found=stored_name, where=await conn.fetchval(SQL_WHERE))


# --------------------------------------------------------------------------------------------------
# The roles of a database and their privileges; `grants.sql` in this folder has the full list.
#
# Migration 0001 creates them and grants the privileges, where the migrating role may create roles.
# Otherwise it prints the statements that an authorised role has to run, and `grant` does the rest.
# Logins are the operator's: `CREATE ROLE homeserver LOGIN; GRANT room_storage_runtime TO
# homeserver`.

PREFIX: Final = "room_storage"
PREFIX_VARIABLE: Final = "STORAGE_ROLE_PREFIX"
NO_ROLES: Final = "none"
PREFIX_PATTERN: Final = re.compile(r"[a-z_][a-z0-9_]{0,40}")

NOT_GRANTED: Final = ("01006", "01007")
"""SQLSTATE of the warnings for a role that may not revoke or grant a privilege."""


def checked_prefix(requested: str | None) -> str:
    """Return the prefix of the roles: as given, else STORAGE_ROLE_PREFIX, else "room_storage".

    Raise `InputError` unless it can be part of a name.
    """
    prefix = requested or os.environ.get(PREFIX_VARIABLE) or PREFIX
    if not PREFIX_PATTERN.fullmatch(prefix):
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


# --------------------------------------------------------------------------------------------------
# Clocks, which may be wrong: a machine that starts in 1970, or one that is a day ahead.
#
# Maintenance that deletes by time takes the earlier one of two clocks, so that a clock that is
# ahead deletes nothing early.

TOLERANCE_MS: Final = 60_000
"""So much may times differ that were taken at once, or one after the other."""

SQL_DATABASE_CLOCK: Final[LiteralString] = """
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint
"""


def now_ms() -> int:
    """Return the time of this process in milliseconds."""
    return time.time_ns() // 1_000_000


async def earlier_now_ms(conn: Connection) -> int:
    """Return the time by the clock of this process or of Postgres, whichever is earlier.

    Log a warning if they differ by more than `TOLERANCE_MS`.
    """
    here, there = now_ms(), int(await conn.fetchval(SQL_DATABASE_CLOCK))
    if abs(here - there) > TOLERANCE_MS:
        logger.warning(
            "the clock of this process and that of Postgres differ by %d s: the earlier one counts",
            abs(here - there) // 1000,
        )
    return min(here, there)
