"""Taking a room for maintenance: nobody else writes to it until the transaction ends, and no plan made before fits afterwards.

A writer plans against `rooms.write_version` from its caches and takes the room's lock only when it writes (storage/persist). So
whoever changes rows that writers may have cached takes the same lock and raises the version in the same transaction: the plans
in flight are refused, their caches forgotten, and they are made again on what is true now.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.errors import UnknownRoom
from storage.persist.attempts import SQL_LOCK_ROOMS

SQL_RAISE_VERSION: Final[LiteralString] = """
UPDATE rooms
SET write_version = write_version + 1
WHERE room_id = $1::text
RETURNING room_nid
"""


async def hold(conn: Connection, room_id: str) -> int:
    """Take the room until the end of the transaction; its nid. Statements after this see all that was committed before. `UnknownRoom`."""
    await conn.execute(SQL_LOCK_ROOMS, [room_id])
    room_nid: int | None = await conn.fetchval(SQL_RAISE_VERSION, room_id)
    if room_nid is None:
        raise UnknownRoom(room_id)
    return room_nid
