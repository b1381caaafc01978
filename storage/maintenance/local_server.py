"""Which server's users are local: what the database remembers, else that of the users whose rooms and sight the tables keep."""

from typing import Final, LiteralString

from storage.database.connection import Database
from storage.database.deployment import NO_SERVER, deployment
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
    """The server: that which the database remembers, else the given one, else whose users it keeps; one without users if it keeps none.

    `WrongServerName` if another is given than remembered; `InputError` if several are kept: then it has to be given.
    """
    async with database.connection() as conn:
        found = await deployment(conn)
        if found is not None and found.server_name is not None:
            if given not in (None, found.server_name):
                raise WrongServerName(str(given), found=found.server_name)
            return found.server_name
        if given is not None:
            return given
        names: list[str] = await conn.fetchvals(SQL_LOCAL_SERVERS)
    if len(names) > 1:
        raise InputError(
            f"the users of several servers are local here ({', '.join(sorted(names))}): give --server-name"
        )
    return names[0] if names else NO_SERVER
