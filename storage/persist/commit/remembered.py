"""Answers from memory: check that nothing was deleted in the room since it was remembered.

A "duplicate" of a cached row writes nothing, so the database has no write to refuse. Deletions are
published in the stream "caches", but a process may hear of one a second later. So each room of such
an answer is compared first: by its nid, which a purge of the whole room ends, and by the number of
its deletions (`rooms.removals`). The whole batch takes one statement for it.

A repeated request of a client is answered without: its event was sent, even if it is purged.
"""

from collections.abc import Iterable
from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.errors import DatabaseConflict
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import AnyEvent, IncomingEvent
from storage.persist.model.results import AppendResult
from storage.persist.model.rows import RoomRow

SQL_IS_CHANGED: Final[LiteralString] = """
SELECT i.room_id
FROM unnest($1::text[], $2::int[], $3::bigint[]) AS i (room_id, room_nid, removals)
LEFT JOIN LATERAL (SELECT x.room_nid, x.removals FROM rooms x
    WHERE x.room_id = i.room_id OFFSET 0) AS r ON true
WHERE r.room_nid IS DISTINCT FROM i.room_nid OR r.removals <> i.removals
LIMIT 1
"""


def remembered_rooms(
    change_set: ChangeSet, answered: Iterable[tuple[AnyEvent, AppendResult]]
) -> dict[str, RoomRow]:
    """Return the cached rooms of duplicates that nothing in this batch was loaded for."""
    return {
        one.room_id: room
        for one, answer in answered
        if answer.outcome == "duplicate"
        and isinstance(one, IncomingEvent)
        and answer.event_id not in change_set.events.rows
        and one.room_id not in change_set.rooms.known
        and (room := change_set.caches.rooms.get(one.room_id)) is not None
    }


async def check_remembered(conn: Connection, rooms: Iterable[RoomRow]) -> None:
    """Raise `DatabaseConflict` if rows of one of these rooms were deleted since it was cached."""
    columns = [(one.room_id, one.room_nid, one.removals) for one in rooms]
    if not columns:
        return
    changed = await conn.fetchval(
        SQL_IS_CHANGED, *(list(column) for column in zip(*columns, strict=True))
    )
    if changed is not None:
        raise DatabaseConflict(f"rows of {changed} were deleted meanwhile")
