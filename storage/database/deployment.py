"""The identity of a database: its id, which tokens carry, and the homeserver of its local users.

The first store that opens it sets the name, even if several open at once. Another name is refused
from then on, because the visibility rows are those of the users of the first. `NO_SERVER` is never
stored: an import without a name leaves the choice open.
"""

import logging
import secrets
import time
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import InputError, WrongServerName

logger: logging.Logger = logging.getLogger(__name__)

NO_SERVER: Final = "localhost.invalid"
"""A server without users (RFC 2606)."""

SQL_DEPLOYMENT: Final[LiteralString] = """
SELECT deployment_id, server_name
FROM deployment
"""

SQL_WHERE: Final[LiteralString] = """
SELECT format('the database %s (schema %s)', current_database(), current_schema())
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


class Deployment(NamedTuple):
    """A database. ``server_name`` None: no store has been opened in it under a name."""

    deployment_id: str
    server_name: str | None


async def deployment(conn: Connection) -> Deployment | None:
    """Return the identity of the database; None if no store has ever been opened in it."""
    return await conn.fetchrow(SQL_DEPLOYMENT, row=Deployment)


async def settled(conn: Connection, server_name: str | None) -> tuple[str, str]:
    """Return the id of this database, and the name to open it under.

    The name is the given or the stored one. Runs in autocommit. Raise `WrongServerName` if another
    one is stored, `InputError` if none is stored or given.
    """
    name = None if server_name == NO_SERVER else server_name
    found = await deployment(conn)
    if found is None or (found.server_name is None and name is not None):
        tag = await conn.execute(
            SQL_REMEMBER, secrets.token_hex(8), time.time_ns() // 1_000_000, name
        )
        if name is not None and tag.endswith("1") and await conn.fetchval(SQL_HAS_ROOMS):
            logger.warning(
                "rooms were imported without a server name: run `room-storage verify --repair` "
                "for the users of %s",
                name,
            )
        found = await deployment(conn)
    if found is None:
        raise InputError("the identity of the database was not stored: is it being restored?")
    if name is not None and found.server_name != name:
        raise WrongServerName(
            name, found=str(found.server_name), where=await conn.fetchval(SQL_WHERE)
        )
    opened = found.server_name or server_name
    if opened is None:
        raise InputError("the database is new: give a server name, whose users are local")
    return found.deployment_id, opened
