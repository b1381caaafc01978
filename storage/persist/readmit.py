"""`readmit`: lift the verdict of the caller on a refused event."""

from typing import Final, LiteralString

from storage.database.connection import Database
from storage.errors import InputError, UnknownEvent
from storage.ids import EventId, RoomId
from storage.persist.commit.group_commit import Writer
from storage.persist.model.incoming import Readmission
from storage.persist.model.results import AppendResult

SQL_ROOM_OF_EVENT: Final[LiteralString] = """
SELECT r.room_id
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_id = $1::text
"""


async def readmit(database: Database, writer: Writer, event_id: EventId) -> AppendResult:
    """Accept a refused event, at a new stream position.

    The result is a "duplicate" for an event that is accepted already. Raise `UnknownEvent`, or
    `InputError` for an event that the caller did not refuse.
    """
    async with database.connection() as conn:
        room_id = await conn.fetchval(SQL_ROOM_OF_EVENT, event_id)
    if room_id is None:
        raise UnknownEvent(event_id)
    [result] = await writer.append([Readmission(event_id, RoomId(room_id))])
    if result.outcome == "missing_parents":  # purged meanwhile
        raise UnknownEvent(event_id)
    if result.outcome == "invalid":
        raise InputError(result.reason or "")
    return result
