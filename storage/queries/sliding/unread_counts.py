"""The unread counts of the joined rooms of a response, by one statement."""

from dataclasses import replace

from storage.database.connection import Connection
from storage.ids import RoomId
from storage.queries.sliding.prepared import PreparedRequest
from storage.queries.sliding.types import SlidingRoom
from storage.queries.unread import UnreadRequest, unread


async def add_unread(
    conn: Connection, request: PreparedRequest, shown: dict[RoomId, SlidingRoom]
) -> None:
    joined = [room_id for room_id, room in shown.items() if room.membership == "join"]
    if not request.body.unread or not joined:
        return
    wanted = UnreadRequest(ignored=list(request.ignored or ()), rows_max=request.rows_max)
    counts = await unread(conn, request.user_id, room_ids=joined, request=wanted)
    for room_id in joined:
        shown[room_id] = replace(shown[room_id], unread=counts.get(room_id))
