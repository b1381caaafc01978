"""Forget a room that is known by out-of-band memberships only, such as invites over federation.

Its version is then a claim of the servers that sent them, and one of them may lie. It must not keep
this server out of the room. The memberships go with it: their ids depend on the version.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection, Database
from storage.errors import UnknownRoom
from storage.ids import RoomId
from storage.maintenance.purge.room import SQL_EVENTS, SQL_LAST, hide
from storage.persist.room_lock import lock_room
from storage.streams.caches import CURRENT_STATE
from storage.streams.invalidate_caches import invalidate_caches, register_writer

SQL_IS_CLAIMED: Final[LiteralString] = """
SELECT NOT EXISTS (
    SELECT
    FROM events e
    WHERE e.room_nid = r.room_nid AND NOT is_out_of_band(e)
)
FROM rooms r
WHERE r.room_id = $1::text AND r.current_state_group IS NULL
"""

ALL: Final = 1 << 62


async def is_claimed(conn: Connection, room_id: RoomId) -> bool:
    """Return whether all events of a room are out of band. An unknown room has none."""
    return await conn.fetchval(SQL_IS_CLAIMED, room_id) is True


async def forget_claimed_room(database: Database, room_id: RoomId) -> bool:
    """Delete a room of which all events are out of band; return whether it is unknown now.

    It needs the rights of a purge, and is one transaction: such a room has few events.
    """
    await register_writer(database)
    try:
        async with database.transaction() as conn:
            room_nid = await lock_room(conn, room_id)
            if not await is_claimed(conn, room_id):
                return False
            await hide(conn, room_nid)
            await conn.execute(SQL_EVENTS, room_nid, ALL)
            await conn.execute(SQL_LAST, room_nid)
            await invalidate_caches(conn, CURRENT_STATE)
            await invalidate_caches(conn, "events")
    except UnknownRoom:  # another process has deleted it
        return True
    return True
