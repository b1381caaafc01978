"""Rooms with a partial state: which they are, and what their state does not say yet.

This server has joined such a room with the members omitted (MSC3706). The states from that join on
lack members, so some requests have no right answer until the rest is stored. They raise
`PartialState`:

  a whole state      state_ids from the join on
  reads of servers   whether a server is in the room is not certain, so it gets nothing
  memberships        a local user's event about a user whose membership is not known

Everything else answers from the known members.
"""

from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import PartialState, UnknownRoom
from storage.ids import EventId, RoomId, ServerName, StateKey

SQL_PARTIAL_ROOMS: Final[LiteralString] = """
SELECT r.room_id, p.join_event_id, p.origin, p.servers, p.began_ts
FROM partial_rooms p
JOIN rooms r USING (room_nid)
JOIN events joined ON joined.event_id = p.join_event_id AND NOT joined.outlier
ORDER BY p.began_ts, r.room_id
"""

SQL_IS_PARTIAL: Final[LiteralString] = """
SELECT is_partial
FROM rooms
WHERE room_id = $1::text
"""

SQL_IS_MEMBER_UNKNOWN: Final[LiteralString] = """
SELECT EXISTS (
    SELECT
    FROM rooms r
    WHERE r.room_id = $1::text AND r.is_partial AND NOT EXISTS (
        SELECT
        FROM state_keys k
        JOIN current_state c USING (state_key_nid)
        WHERE k.type_nid = 2 AND k.state_key = $2::text AND c.room_nid = r.room_nid
    )
)
"""

SQL_OWN_MEMBERS: Final[LiteralString] = """
SELECT k.state_key, e.event_id
FROM rooms r
JOIN current_state c USING (room_nid)
JOIN state_keys k USING (state_key_nid)
JOIN events e ON e.event_nid = c.event_nid
WHERE r.room_id = $1::text AND c.membership <> 5
    AND right(k.state_key, length($2::text) + 1) = ':' || $2::text
"""


@dataclass(frozen=True, slots=True)
class PartialRoom:
    """A room of which members are missing.

    ``join_event_id`` is the join with which this server entered it, ``origin`` the server that
    answered, and ``servers`` are those in the room before the join, as the origin says.
    ``since_ms`` is the time of the answer.
    """

    room_id: RoomId
    join_event_id: EventId
    origin: ServerName
    servers: frozenset[ServerName]
    since_ms: int


class PartialRoomRow(NamedTuple):
    """A row of `partial_rooms`."""

    room_id: str
    join_event_id: str
    origin: str
    servers: list[str]
    began_ts: int


class OwnMemberRow(NamedTuple):
    """A local user and the event of their membership."""

    state_key: str
    event_id: str


async def partial_rooms(conn: Connection) -> list[PartialRoom]:
    """Return the rooms with a partial state, the one that waits longest first."""
    return [
        PartialRoom(
            RoomId(row.room_id),
            EventId(row.join_event_id),
            ServerName(row.origin),
            frozenset(map(ServerName, row.servers)),
            row.began_ts,
        )
        for row in await conn.fetch(SQL_PARTIAL_ROOMS, row=PartialRoomRow)
    ]


async def own_members(
    conn: Connection, room_id: RoomId, server_name: str
) -> dict[StateKey, EventId]:
    """Return the memberships of local users who have left a room, from an earlier stay.

    Give them as part of the state before the join, unless the answer has others. Without them, an
    old fork in which these users are joined would let them in again.
    """
    rows = await conn.fetch(SQL_OWN_MEMBERS, room_id, server_name, row=OwnMemberRow)
    return {("m.room.member", row.state_key): EventId(row.event_id) for row in rows}


async def refuse_partial(conn: Connection, room_id: RoomId) -> None:
    """Raise `PartialState` if members of the room are missing. `UnknownRoom`."""
    is_partial = await conn.fetchval(SQL_IS_PARTIAL, room_id)
    if is_partial is None:
        raise UnknownRoom(room_id)
    if is_partial:
        raise PartialState(room_id)


async def refuse_unknown_member(conn: Connection, room_id: RoomId, user_id: str) -> None:
    """Raise `PartialState` if it is not known whether a user is a member of the room."""
    if await conn.fetchval(SQL_IS_MEMBER_UNKNOWN, room_id, user_id):
        raise PartialState(room_id)
