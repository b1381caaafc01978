"""Facts that the receiver of other servers' events needs: rooms, servers, and stored events.

Each is one statement, and none reads the bytes of an event.
"""

from collections.abc import Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import EventId, RoomId, ServerName, UserId

SQL_KNOWN_ROOMS: Final[LiteralString] = """
SELECT r.room_id, r.room_version, COALESCE(v.joined_count > 0, false) AS is_resident
FROM rooms r
LEFT JOIN principals p ON p.name = $2::text
LEFT JOIN visibility v ON v.room_nid = r.room_nid AND v.principal_nid = p.principal_nid
WHERE r.room_id = ANY($1::text[])
"""

SQL_SERVERS_BY_SIZE: Final[LiteralString] = """
SELECT name
FROM (
    SELECT p.name, v.joined_count
    FROM rooms r
    JOIN visibility v USING (room_nid)
    JOIN principals p USING (principal_nid)
    WHERE r.room_id = $1::text AND v.joined_count > 0 AND NOT starts_with(p.name, '@')
    UNION ALL
    SELECT unnest(p.origin || p.servers), 0
    FROM rooms r
    JOIN partial_rooms p USING (room_nid)
    WHERE r.room_id = $1::text
) AS s
GROUP BY name
ORDER BY max(joined_count) DESC, name
LIMIT $2::int
"""

SQL_STORED_KEYS: Final[LiteralString] = """
SELECT e.event_id, r.room_id, t.type, k.state_key, e.rejected, e.outlier,
    is_out_of_band(e) AS out_of_band
FROM unnest($1::text[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.id OFFSET 0) AS e
JOIN rooms r USING (room_nid)
JOIN event_types t ON t.type_nid = e.type_nid
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
"""

SQL_LATEST_IDS: Final[LiteralString] = """
SELECT e.event_id
FROM events e
WHERE e.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text)
    AND NOT e.outlier AND NOT e.backfilled
ORDER BY e.stream_ordering DESC
LIMIT $2::int
"""


SQL_PENDING_MEMBERSHIP: Final[LiteralString] = """
SELECT e.event_id
FROM rooms r
JOIN principals p ON p.name = $2::text
JOIN memberships m USING (room_nid, principal_nid)
JOIN events e USING (event_nid)
WHERE r.room_id = $1::text AND m.membership IN (3, 4)
"""


class KnownRoom(NamedTuple):
    """A room of the store. ``is_resident``: a local user is joined to it now."""

    room_id: RoomId
    room_version: str
    is_resident: bool


class ServerRow(NamedTuple):
    """A server in a room."""

    name: str


class EventIdRow(NamedTuple):
    """The id of an event."""

    event_id: str


class StoredKey(NamedTuple):
    """A stored event without its bytes: its room, its state key, and how it is stored."""

    event_id: str
    room_id: str
    type: str
    state_key: str | None
    rejected: str | None
    outlier: bool
    out_of_band: bool

    @property
    def is_authorised(self) -> bool:
        """Return whether it may be an auth event of others, and part of a state."""
        return self.rejected is None and not self.out_of_band


async def known_rooms(
    conn: Connection, room_ids: Iterable[str], server_name: str
) -> dict[str, KnownRoom]:
    """Return those of the rooms that the store knows, by id."""
    rows = await conn.fetch(SQL_KNOWN_ROOMS, list(room_ids), server_name, row=KnownRoom)
    return {row.room_id: row for row in rows}


async def servers_by_size(conn: Connection, room_id: RoomId, limit: int) -> list[ServerName]:
    """Return servers that are joined to a room, those with the most users first."""
    rows = await conn.fetch(SQL_SERVERS_BY_SIZE, room_id, limit, row=ServerRow)
    return [ServerName(row.name) for row in rows]


async def stored_keys(conn: Connection, event_ids: Iterable[str]) -> dict[EventId, StoredKey]:
    rows = await conn.fetch(SQL_STORED_KEYS, list(event_ids), row=StoredKey)
    return {EventId(row.event_id): row for row in rows}


async def latest_ids(conn: Connection, room_id: RoomId, limit: int) -> list[EventId]:
    """Return the live events of a room that were stored last, the latest first."""
    rows = await conn.fetch(SQL_LATEST_IDS, room_id, limit, row=EventIdRow)
    return [EventId(row.event_id) for row in rows]


async def pending_membership(conn: Connection, room_id: RoomId, user_id: UserId) -> EventId | None:
    """Return the event of a local user's invite or knock, or None."""
    row = await conn.fetchrow(SQL_PENDING_MEMBERSHIP, room_id, user_id, row=EventIdRow)
    return None if row is None else EventId(row.event_id)
