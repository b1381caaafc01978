"""The current state of a room, its extremities, and the rooms that a user is in.

state_at.py has the state at events.
"""

from collections.abc import Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.rooms import require_room
from storage.ids import EventId, RoomId, UserId
from storage.queries.state_entries import StateMap
from storage.turns import parts

SQL_CURRENT_STATE: Final[LiteralString] = """
SELECT t.type, k.state_key, e.event_id
FROM rooms r
JOIN current_state c USING (room_nid)
JOIN state_keys k USING (state_key_nid)
JOIN event_types t USING (type_nid)
JOIN events e ON e.event_nid = c.event_nid
WHERE r.room_id = $1::text AND ($2::text[] IS NULL OR t.type = ANY($2::text[]))
"""

SQL_FORWARD_EXTREMITIES: Final[LiteralString] = """
SELECT e.event_id
FROM rooms r
JOIN events e ON e.event_nid = ANY(r.forward_extremities)
WHERE r.room_id = $1::text
"""

SQL_BACKWARD_EXTREMITIES: Final[LiteralString] = """
SELECT m.event_id
FROM rooms r
JOIN missing_events m USING (room_nid)
WHERE r.room_id = $1::text
"""

SQL_ROOMS_OF: Final[LiteralString] = """
SELECT r.room_id
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = $1::text AND m.membership = 5
ORDER BY r.room_id
"""


class CurrentStateRow(NamedTuple):
    """One entry of a current state."""

    type: str
    state_key: str
    event_id: str


async def current_state(
    conn: Connection, room_id: RoomId, *, types: Iterable[str] | None = None
) -> StateMap:
    """Return the resolved current state of a room.

    `UnknownRoom`; {} for a room that is only known by outliers.
    """
    rows = await conn.fetch(
        SQL_CURRENT_STATE, room_id, None if types is None else list(types), row=CurrentStateRow
    )
    if not rows:
        await require_room(conn, room_id)
    found: StateMap = {}
    async for part in parts(rows):
        found |= {(row.type, row.state_key): EventId(row.event_id) for row in part}
    return found


async def forward_extremities(conn: Connection, room_id: RoomId) -> set[EventId]:
    """Return the forward extremities: the prev_events of the next event."""
    ids = await conn.fetchvals(SQL_FORWARD_EXTREMITIES, room_id)
    if not ids:
        await require_room(conn, room_id)
    return set(ids)


async def backward_extremities(conn: Connection, room_id: RoomId) -> set[EventId]:
    """Return the ids of missing events: stored events name them as parent."""
    ids = await conn.fetchvals(SQL_BACKWARD_EXTREMITIES, room_id)
    if not ids:
        await require_room(conn, room_id)
    return set(ids)


async def rooms_of(conn: Connection, user_id: UserId) -> list[RoomId]:
    """Return the rooms that a local user is joined to, by id."""
    return await conn.fetchvals(SQL_ROOMS_OF, user_id)
