"""Lock a room for maintenance: no writer writes to it until the transaction ends.

A writer plans against `rooms.write_version` from its caches and locks the room only when it writes
(storage/persist). Under the lock, maintenance may do one of two things:

  lock_room                 change any rows that writers may have cached. The version is raised, so
                            writers drop their pending plans and caches and plan again.
  lock_room_keeping_plans   delete the things that storage/persist/write/dependencies.py lists, and
                            publish them
                            (`storage.streams.invalidate_caches.publish_removed`); pending
                            plans are written unless they depend on them. Or change only what no
                            plan depends on.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.errors import UnknownRoom
from storage.persist.commit.retry import SQL_LOCK_ROOMS

SQL_RAISE_VERSION: Final[LiteralString] = """
UPDATE rooms
SET write_version = write_version + 1
WHERE room_id = $1::text
RETURNING room_nid
"""

SQL_ROOM_NID: Final[LiteralString] = """
SELECT room_nid
FROM rooms
WHERE room_id = $1::text
"""


async def lock_room(conn: Connection, room_id: str) -> int:
    """Lock the room until the end of the transaction and invalidate all plans; return its nid.

    Later statements of the transaction see everything committed before. Raise `UnknownRoom`.
    """
    await conn.execute(SQL_LOCK_ROOMS, [room_id])
    room_nid: int | None = await conn.fetchval(SQL_RAISE_VERSION, room_id)
    if room_nid is None:
        raise UnknownRoom(room_id)
    return room_nid


async def lock_room_keeping_plans(conn: Connection, room_id: str) -> int:
    """Lock the room, but keep the plans of writers whose dependencies stay; return its nid.

    Raise `UnknownRoom`.
    """
    await conn.execute(SQL_LOCK_ROOMS, [room_id])
    room_nid: int | None = await conn.fetchval(SQL_ROOM_NID, room_id)
    if room_nid is None:
        raise UnknownRoom(room_id)
    return room_nid
