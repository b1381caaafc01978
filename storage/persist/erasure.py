"""Senders who asked to be forgotten.

Their events stay as they are, signatures and all; reads show others the redacted form.
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


async def erase_user(conn: Connection, user_id: UserId, erased_ts: int) -> bool:
    """From now on, what this user ever sent is shown whole only to users, and servers of users, who were in the room then.

    What is state is told whole all the same where a state is told: it is the room's. Whether that is new.
    """
    return await conn.execute(SQL_ERASE, user_id, erased_ts) != "INSERT 0 0"


async def restore_user(conn: Connection, user_id: UserId) -> bool:
    """Take that back: their events are shown as they are again. Whether the user was erased."""
    return await conn.execute(SQL_RESTORE, user_id) != "DELETE 0"
