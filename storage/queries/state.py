"""The state of a room: now, and before or after an event; which rooms a user is in; the ends of what is held."""

from collections.abc import Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import StateUnknown, UnknownEvent, UnknownRoom
from storage.ids import EventId, RoomId, StateKey, UserId

StateMap = dict[StateKey, EventId]

SQL_STATE_AT: Final[LiteralString] = """
WITH
at AS (  -- the groups wanted, one a given event
    SELECT event_id,
        CASE WHEN $2::boolean THEN COALESCE(state_group_after, state_group_before) ELSE state_group_before END AS state_group
    FROM events
    WHERE event_id = ANY($1::text[])
),
step AS (  -- the rows of their paths, by position
    SELECT at.event_id, p.place, p.part
    FROM at
    JOIN state_groups g USING (state_group)
    CROSS JOIN unnest(g.path) WITH ORDINALITY AS p (part, place)
),
entry AS (
    SELECT s.event_id, s.place, e.state_key_nid, e.event_nid
    FROM step s
    JOIN state_groups g ON g.state_group = s.part
    CROSS JOIN LATERAL (
        SELECT * FROM unnest(g.key_nids, g.event_nids)
        UNION ALL
        SELECT * FROM unnest(g.member_key_nids, g.member_event_nids)
        WHERE $3::text[] IS NULL OR 'm.room.member' = ANY($3::text[])
    ) AS e (state_key_nid, event_nid)
),
folded AS (  -- the last writer of each key
    SELECT DISTINCT ON (event_id, state_key_nid) event_id, state_key_nid, event_nid
    FROM entry
    ORDER BY event_id, state_key_nid, place DESC
)
SELECT f.event_id AS at_event_id, t.type, k.state_key, e.event_id
FROM folded f
JOIN state_keys k USING (state_key_nid)
JOIN event_types t USING (type_nid)
JOIN events e ON e.event_nid = f.event_nid
WHERE $3::text[] IS NULL OR t.type = ANY($3::text[])
"""

SQL_KNOWN: Final[LiteralString] = """
SELECT event_id, state_group_before IS NOT NULL AS has_state
FROM events
WHERE event_id = ANY($1::text[])
"""

SQL_CURRENT_STATE: Final[LiteralString] = """
SELECT t.type, k.state_key, e.event_id
FROM rooms r
JOIN current_state c USING (room_nid)
JOIN state_keys k USING (state_key_nid)
JOIN event_types t USING (type_nid)
JOIN events e ON e.event_nid = c.event_nid
WHERE r.room_id = $1::text AND ($2::text[] IS NULL OR t.type = ANY($2::text[]))
"""

SQL_ROOM_EXISTS: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM rooms WHERE room_id = $1::text)
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


class EntryRow(NamedTuple):
    """One entry of the state at an event."""

    at_event_id: str
    type: str
    state_key: str
    event_id: str


class CurrentRow(NamedTuple):
    """One entry of a current state."""

    type: str
    state_key: str
    event_id: str


class KnownRow(NamedTuple):
    """Whether the state at an event is known."""

    event_id: str
    has_state: bool


async def states_at(
    conn: Connection, event_ids: Iterable[EventId], *, after: bool, types: Iterable[str] | None = None
) -> dict[EventId, StateMap]:
    """The state before or after each of these events, whole or only of some types, in two statements.

    `UnknownEvent` for an id that is not held, `StateUnknown` for an outlier.
    """
    wanted = list(dict.fromkeys(event_ids))
    known = {row.event_id: row.has_state for row in await conn.fetch(SQL_KNOWN, wanted, row=KnownRow)}
    for event_id in wanted:
        if event_id not in known:
            raise UnknownEvent(event_id)
        if not known[event_id]:
            raise StateUnknown(event_id)
    states: dict[EventId, StateMap] = {event_id: {} for event_id in wanted}
    for row in await conn.fetch(SQL_STATE_AT, wanted, after, None if types is None else list(types), row=EntryRow):
        states[EventId(row.at_event_id)][row.type, row.state_key] = EventId(row.event_id)
    return states


async def current_state(conn: Connection, room_id: RoomId, *, types: Iterable[str] | None = None) -> StateMap:
    """The resolved current state of a room. `UnknownRoom`; {} for a room that is only known by outliers."""
    rows = await conn.fetch(SQL_CURRENT_STATE, room_id, None if types is None else list(types), row=CurrentRow)
    if not rows:
        await require_room(conn, room_id)
    return {(row.type, row.state_key): EventId(row.event_id) for row in rows}


async def require_room(conn: Connection, room_id: RoomId) -> None:
    """`UnknownRoom` if the store has never heard of it."""
    if not await conn.fetchval(SQL_ROOM_EXISTS, room_id):
        raise UnknownRoom(room_id)


async def forward_extremities(conn: Connection, room_id: RoomId) -> set[EventId]:
    """The events on which the next one will build."""
    ids = await conn.fetchvals(SQL_FORWARD_EXTREMITIES, room_id)
    if not ids:
        await require_room(conn, room_id)
    return set(ids)


async def backward_extremities(conn: Connection, room_id: RoomId) -> set[EventId]:
    """The ids of missing events: named as parent by a held one, and not held in the timeline."""
    ids = await conn.fetchvals(SQL_BACKWARD_EXTREMITIES, room_id)
    if not ids:
        await require_room(conn, room_id)
    return set(ids)


async def rooms_of(conn: Connection, user_id: UserId) -> list[RoomId]:
    """The rooms that a local user is joined to, by id."""
    return await conn.fetchvals(SQL_ROOMS_OF, user_id)
