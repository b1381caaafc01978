"""Taking a room for maintenance: nobody else writes to it until the transaction ends.

A writer plans against `rooms.write_version` from its caches and takes the room's lock only when it
writes (storage/persist). Who has the lock may do one of two things:

hold        change any rows that writers may have cached: the version is raised, so the plans in
            flight are refused, their caches forgotten, and they are made again on what is true now
hold_still  throw away what storage/persist/write/dependencies.py speaks of, and say so
            (`storage.maintenance.invalidate_caches.publish_removed`): the plans in flight are
            written, but for those that build on what has gone; or change nothing that a plan is
            made of
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
    """Take the room until the end of the transaction, and refuse all plans; its nid.

    Statements after this see all that was committed before.

    `UnknownRoom`.
    """
    await conn.execute(SQL_LOCK_ROOMS, [room_id])
    room_nid: int | None = await conn.fetchval(SQL_RAISE_VERSION, room_id)
    if room_nid is None:
        raise UnknownRoom(room_id)
    return room_nid


async def lock_room_keeping_plans(conn: Connection, room_id: str) -> int:
    """The same, but the plans of writers stay good, as far as what they build on does.

    `UnknownRoom`.
    """
    await conn.execute(SQL_LOCK_ROOMS, [room_id])
    room_nid: int | None = await conn.fetchval(SQL_ROOM_NID, room_id)
    if room_nid is None:
        raise UnknownRoom(room_id)
    return room_nid
