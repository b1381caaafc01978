"""The check whether the store has a room, for reads without a result."""

from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.errors import UnknownRoom
from storage.ids import RoomId

SQL_ROOM_EXISTS: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM rooms WHERE room_id = $1::text)
"""


async def require_room(conn: Connection, room_id: RoomId) -> None:
    """Raise `UnknownRoom` if the store does not have the room."""
    if not await conn.fetchval(SQL_ROOM_EXISTS, room_id):
        raise UnknownRoom(room_id)
