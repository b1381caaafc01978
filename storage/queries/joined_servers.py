"""The servers that are joined to a room: now, and in the state before an event.

`visibility` has a row for each server with users in the room. Its `joined_count` is of the current
state. For another state the ranges of its audiences say whether a user of it was joined: an
audience is a set of principals, and that of a state group is the set at this state.

Of a room with a partial state these servers are too few. So the servers that were in the room
before the join are added: an event must reach all of them.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import StateUnknown, UnknownEvent, UnknownRoom
from storage.ids import EventId, RoomId, ServerName

SQL_JOINED_SERVERS: Final[LiteralString] = """
SELECT ARRAY(
    SELECT p.name
    FROM visibility v
    JOIN principals p USING (principal_nid)
    -- no local user: theirs is the topological ordering of a join, and a name with @
    WHERE v.room_nid = r.room_nid AND v.last_join_topological IS NULL AND v.joined_count > 0
        AND left(p.name, 1) <> '@'
    UNION
    SELECT unnest(p.servers)
    FROM partial_rooms p
    WHERE r.is_partial AND p.room_nid = r.room_nid
) AS servers
FROM rooms r
WHERE r.room_id = $1::text
"""

SQL_JOINED_SERVERS_AT: Final[LiteralString] = """
WITH at AS MATERIALIZED (
    SELECT r.room_nid, r.is_partial, e.event_nid, e.outlier, g.audience
    FROM rooms r
    LEFT JOIN events e ON e.room_nid + 0 = r.room_nid AND e.event_id = $2::text
    LEFT JOIN state_groups g ON g.state_group = e.state_group_before
    WHERE r.room_id = $1::text
)
SELECT at.event_nid IS NOT NULL AS is_stored, at.audience IS NOT NULL AS has_state, ARRAY(
    SELECT p.name
    FROM visibility v
    JOIN principals p USING (principal_nid)
    WHERE v.room_nid = at.room_nid AND v.last_join_topological IS NULL AND left(p.name, 1) <> '@'
        -- not everybody, not the shared audiences; + 0: the primary key leads over all members
        AND v.principal_nid + 0 > 2
        AND CASE
            WHEN at.audience < v.first_audience
                THEN joined_before(v.room_nid, v.principal_nid, at.audience)
            ELSE v.audiences @> at.audience
                AND NOT COALESCE(v.invited_audiences @> at.audience, false)
        END
    UNION
    SELECT unnest(p.servers)
    FROM partial_rooms p
    WHERE at.is_partial AND p.room_nid = at.room_nid
) AS servers
FROM at
"""


class ServersRow(NamedTuple):
    """The servers of a room."""

    servers: list[str]


class ServersAtRow(NamedTuple):
    """The servers in the state before an event, if it is stored with its state."""

    is_stored: bool
    has_state: bool
    servers: list[str]


async def joined_servers(conn: Connection, room_id: RoomId) -> set[ServerName]:
    """Return the servers with a user who is joined in the room's current state. `UnknownRoom`."""
    row = await conn.fetchrow(SQL_JOINED_SERVERS, room_id, row=ServersRow)
    if row is None:
        raise UnknownRoom(room_id)
    return set(map(ServerName, row.servers))


async def joined_servers_at(
    conn: Connection, room_id: RoomId, event_id: EventId
) -> set[ServerName]:
    """Return the servers with a user who is joined in the state before an event of the room.

    `UnknownRoom`; `UnknownEvent`, also for an event of another room; `StateUnknown` for an outlier.
    """
    row = await conn.fetchrow(SQL_JOINED_SERVERS_AT, room_id, event_id, row=ServersAtRow)
    if row is None:
        raise UnknownRoom(room_id)
    if not row.is_stored:
        raise UnknownEvent(event_id)
    if not row.has_state:
        raise StateUnknown(event_id)
    return set(map(ServerName, row.servers))
