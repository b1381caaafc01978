"""The changes of a room's current state, latest first: of all keys, or of one.

A change has the event at its position. Where that is not the new value itself, resolution made the
change: the key went back to an earlier value, lost it, or took one that had arrived before.
Only the latest changes of the room are read (`SCANNED_MAX`).
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import EventId, RoomId

SCANNED_MAX: Final = 5_000

SQL_CHANGES: Final[LiteralString] = """
SELECT d.stream_ordering, t.type, k.state_key, n.event_id, n.sender, p.event_id AS replaced,
    at.event_id AS caused_by,
    at.event_id IS DISTINCT FROM n.event_id AS is_by_resolution
FROM (
    SELECT d.stream_ordering, d.state_key_nid, d.event_nid, d.prev_event_nid
    FROM state_deltas d
    WHERE d.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text)
    ORDER BY d.stream_ordering DESC, d.state_key_nid
    LIMIT $4::bigint
) AS d
JOIN state_keys k USING (state_key_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN LATERAL (
    SELECT e.event_id, s.name AS sender
    FROM events e
    JOIN principals s ON s.principal_nid = e.sender_nid
    WHERE e.event_nid = d.event_nid
) AS n ON true
LEFT JOIN events p ON p.event_nid = d.prev_event_nid
LEFT JOIN events at ON at.stream_ordering = d.stream_ordering
WHERE ($2::text IS NULL OR t.type = $2::text) AND ($3::text IS NULL OR k.state_key = $3::text)
ORDER BY d.stream_ordering DESC, t.type, k.state_key
LIMIT $5::bigint
"""


class KeyChangeRow(NamedTuple):
    """A change of the current state.

    ``event_id`` None: the key was removed. ``caused_by`` is the event at the position: None if it
    is not stored, or if members were added to a partial state.
    """

    stream_ordering: int
    type: str
    state_key: str
    event_id: EventId | None
    sender: str | None
    replaced: EventId | None
    caused_by: EventId | None
    is_by_resolution: bool


async def key_history(
    conn: Connection,
    room_id: RoomId,
    type_: str | None = None,
    state_key: str | None = None,
    *,
    limit: int = 100,
) -> list[KeyChangeRow]:
    """Return the latest changes of a room's state, of all types and keys or of these."""
    return await conn.fetch(
        SQL_CHANGES, room_id, type_, state_key, SCANNED_MAX, limit, row=KeyChangeRow
    )
