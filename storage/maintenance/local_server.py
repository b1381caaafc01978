"""Find the local server's name.

It is the one that the database remembers, else that of the users in `visibility` and `memberships`.
"""

from typing import Final, LiteralString

from storage.database.connection import Database
from storage.database.deployment import NO_SERVER, SQL_WHERE, deployment
from storage.errors import InputError, WrongServerName

SQL_LOCAL_SERVERS: Final[LiteralString] = """
SELECT DISTINCT substr(p.name, strpos(p.name, ':') + 1)
FROM principals p
WHERE p.name LIKE '@%'
    AND (
        EXISTS (SELECT FROM visibility v WHERE v.principal_nid = p.principal_nid)
        OR EXISTS (SELECT FROM memberships m WHERE m.principal_nid = p.principal_nid)
    )
LIMIT 10
"""


async def local_server_name(database: Database, given: str | None = None) -> str:
    """Return the name of the local server.

    That is the one that the database remembers, else ``given``, else that of the users in the
    tables. If there are none, return `NO_SERVER`. Raise `WrongServerName` if ``given`` differs from
    the remembered one. Raise `InputError` if users of several servers are stored: then the caller
    must give a name.
    """
    async with database.connection() as conn:
        found = await deployment(conn)
        if found is not None and found.server_name is not None:
            if given not in (None, found.server_name):
                where = await conn.fetchval(SQL_WHERE)
                raise WrongServerName(str(given), found=found.server_name, where=where)
            return found.server_name
        if given is not None:
            return given
        names: list[str] = await conn.fetchvals(SQL_LOCAL_SERVERS)
    if len(names) > 1:
        raise InputError(
            f"the users of several servers are local here ({', '.join(sorted(names))}):"
            " give --server-name"
        )
    return names[0] if names else NO_SERVER
