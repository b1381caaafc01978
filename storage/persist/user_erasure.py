"""Erase users who asked for it, and undo that.

Their events stay as they are, with signatures. Reads return the redacted form to others. Facts that
the homeserver has published under their id, such as their presence, lose their values for good.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.ids import UserId

SQL_ERASE: Final[LiteralString] = """
WITH named AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), $1::text
    WHERE NOT EXISTS (SELECT FROM principals WHERE name = $1::text)
    ON CONFLICT (name) DO NOTHING
    RETURNING principal_nid
),
emptied AS (
    UPDATE published_facts
    SET value = 'null'
    WHERE key = $1::text AND value <> 'null'
)
INSERT INTO erased_users (principal_nid, erased_ts)
SELECT principal_nid, $2::bigint FROM named
UNION ALL
SELECT principal_nid, $2::bigint FROM principals WHERE name = $1::text
ON CONFLICT (principal_nid) DO NOTHING
"""

SQL_RESTORE: Final[LiteralString] = """
DELETE FROM erased_users
WHERE principal_nid = (SELECT principal_nid FROM principals WHERE name = $1::text)
"""

SQL_IS_KNOWN: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM principals WHERE name = $1::text)
"""


async def is_known(conn: Connection, user_id: UserId) -> bool:
    """Return whether any stored row names the user. If not, the id may be mistyped."""
    known: bool = await conn.fetchval(SQL_IS_KNOWN, user_id)
    return known


async def erase_user(conn: Connection, user_id: UserId, erased_ts: int) -> bool:
    """Erase a user, and return whether that is new.

    From now on the user's events are returned in full only to users who were in the room then, and
    their servers. State events are still returned in full as part of a state, because they belong
    to the room. The values of facts under the user's id become null: readers still see that there
    was news.
    """
    return await conn.execute(SQL_ERASE, user_id, erased_ts) != "INSERT 0 0"


async def restore_user(conn: Connection, user_id: UserId) -> bool:
    """Undo the erasure of a user, but for emptied facts, and return whether there was one."""
    return await conn.execute(SQL_RESTORE, user_id) != "DELETE 0"
