"""Which server's users are local, where nobody says: that of the users whose rooms and sight the tables keep."""

from typing import Final, LiteralString

from storage.database.connection import Database
from storage.errors import InputError

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

NOBODY: Final = "localhost.invalid"
"""A server without users (RFC 2606)."""


async def local_server_name(database: Database) -> str:
    """The server; one without users if the tables keep none. `InputError` if there are several: then it has to be given."""
    async with database.connection() as conn:
        names: list[str] = await conn.fetchvals(SQL_LOCAL_SERVERS)
    if len(names) > 1:
        raise InputError(f"the users of several servers are local here ({', '.join(sorted(names))}): give --server-name")
    return names[0] if names else NOBODY
