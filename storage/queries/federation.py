"""Federation requests for history: backfill, missing events, and whether a server is in a room.

Server-server API, "Backfilling and retrieving missing events", "Retrieving events". A walk over the
graph is one statement (`ancestors_of` and `events_between` in the schema). One step reads the
parents of one event by their keys. So the rows read are bounded by the response, 20 parents to an
event, and by `Config.traversal_rows_max`, never by the size of the room. A walk stays in the room,
whatever parents events name.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS, WITHHELD
from storage.database.connection import Connection, require_room
from storage.database.placeholders import compose, fill
from storage.errors import UnknownEvent, UnknownRoom
from storage.ids import EventId, RoomId, ServerName, UserId
from storage.queries.auth_chain import state_and_chain_ids
from storage.queries.events import (
    TEMPLATE_EVENT,
    ReaderEventRow,
    StoredEvent,
    StoredEventRow,
    stored_of,
)
from storage.queries.gaps import refuse_partial
from storage.queries.state_at import event_nids_before

TEMPLATE_TRAVERSAL: Final[LiteralString] = """
WITH
server AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = :server_name),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, v.*
    FROM server
    CROSS JOIN rooms r
    CROSS JOIN LATERAL visibility_of(r.room_nid, server.principal_nid) AS v
    WHERE r.room_id = :room_id AND (:server_name IS NULL OR NOT r.is_partial)
),
found AS MATERIALIZED (
    SELECT walk.event_nid
    FROM room r
    CROSS JOIN LATERAL {walk} AS walk (event_nid)
)
SELECT :server_name IS NOT NULL AND (
        NOT server_sees(e, room.own_audiences, room.shared_audiences, room.world_audiences,
            room.reader_nid, room.unread)
        OR (:withheld.of(room))
    ) AS withheld,
    {event}
FROM room
CROSS JOIN found
JOIN events e USING (event_nid)
WHERE :server_name IS NULL
    OR server_gets(e, room.joined_audiences, room.world_audiences, room.reader_nid, room.unread)
ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
"""

TEMPLATE_NIDS: Final[LiteralString] = """
ARRAY(
    SELECT e.event_nid
    FROM unnest({ids}) WITH ORDINALITY AS one (id, place)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS e
    ORDER BY one.place
)
"""
"""The events of these ids that are stored, in their order."""

PART_EVENT: Final[LiteralString] = fill(TEMPLATE_EVENT, event="e", room="room")

TEMPLATE_ANCESTORS: Final[LiteralString] = """
ancestors_of(r.room_nid, {nids}, :limit, :rows_max)
"""

SQL_BACKFILL: Final[LiteralString] = compose(
    fill(
        TEMPLATE_TRAVERSAL,
        walk=fill(TEMPLATE_ANCESTORS, nids=fill(TEMPLATE_NIDS, ids=":event_ids")),
        event=PART_EVENT,
        order="DESC",
    ),
    WITHHELD,
    room_id="text",
    event_ids="text[]",
    limit="int",
    server_name="text",
    rows_max="int",
).sql

TEMPLATE_BETWEEN: Final[LiteralString] = """
events_between(r.room_nid, {earliest}, {latest}, :limit, :min_depth, :rows_max)
"""

SQL_MISSING: Final[LiteralString] = compose(
    fill(
        TEMPLATE_TRAVERSAL,
        walk=fill(
            TEMPLATE_BETWEEN,
            earliest=fill(TEMPLATE_NIDS, ids=":earliest"),
            latest=fill(TEMPLATE_NIDS, ids=":latest"),
        ),
        event=PART_EVENT,
        order="ASC",
    ),
    WITHHELD,
    room_id="text",
    earliest="text[]",
    latest="text[]",
    limit="int",
    min_depth="bigint",
    server_name="text",
    rows_max="int",
).sql

SQL_IS_RESIDENT: Final[LiteralString] = fill("""
SELECT CASE WHEN r.is_partial THEN EXISTS (
        -- in the room before the join, and no user of it has left since
        SELECT
        FROM partial_rooms q
        WHERE q.room_nid = r.room_nid AND $2::text = ANY(q.servers) AND NOT EXISTS (
            SELECT
            FROM current_state c
            JOIN state_keys k USING (state_key_nid)
            WHERE c.room_nid = r.room_nid AND c.membership <> {JOIN}
                AND substr(k.state_key, strpos(k.state_key, ':') + 1) = $2::text
        )
    ) OR v.is_joined ELSE v.is_joined END
FROM rooms r
CROSS JOIN LATERAL (
    SELECT EXISTS (
        SELECT
        FROM principals p
        JOIN visibility x USING (principal_nid)
        WHERE p.name = $2::text AND x.room_nid = r.room_nid AND x.joined_count > 0
    ) AS is_joined
) AS v
WHERE r.room_id = $1::text
""")


async def backfill(
    conn: Connection,
    room_id: RoomId,
    from_ids: Sequence[EventId],
    limit: int,
    *,
    server_name: ServerName | None,
    rows_max: int,
) -> list[StoredEvent]:
    """Return these events and their ancestors, newest first in topological order.

    The walk goes through rejected events, and leaves them out. Events that ``server_name`` may not
    see are redacted; None sees all. A server that was never in the room gets only the
    world-readable ones of the ``limit`` events. Ids that are not stored are skipped. `UnknownRoom`.
    """
    rows = await conn.fetch(
        SQL_BACKFILL, room_id, from_ids, limit, server_name, rows_max, row=ReaderEventRow
    )
    return await _stored(conn, room_id, rows, server_name)


async def missing_events(
    conn: Connection,
    room_id: RoomId,
    earliest: Iterable[EventId],
    latest: Iterable[EventId],
    *,
    limit: int,
    min_depth: int,
    server_name: ServerName | None,
    rows_max: int,
) -> list[StoredEvent]:
    """Return the events between two sets, without these: found breadth first, oldest first.

    The walk begins at ``latest``. ``min_depth`` applies to the depth that senders claim. Ids that
    are not stored are no error. ``server_name`` is as in `backfill`. `UnknownRoom`.
    """
    rows = await conn.fetch(
        SQL_MISSING,
        room_id,
        list(earliest),
        list(latest),
        limit,
        min_depth,
        server_name,
        rows_max,
        row=ReaderEventRow,
    )
    return await _stored(conn, room_id, rows, server_name)


async def is_resident(conn: Connection, server_name: ServerName, room_id: RoomId) -> bool:
    """Return whether a user of the server is joined in the room's current state. `UnknownRoom`."""
    resident = await conn.fetchval(SQL_IS_RESIDENT, room_id, server_name)
    if resident is None:
        raise UnknownRoom(room_id)
    return bool(resident)


async def _stored(
    conn: Connection,
    room_id: RoomId,
    rows: Sequence[ReaderEventRow],
    server_name: ServerName | None,
) -> list[StoredEvent]:
    sent = server_name is not None
    if not rows:
        await (refuse_partial if sent else require_room)(conn, room_id)
    return [stored_of(row.event, withheld=row.withheld, sent=sent) for row in rows]


# --------------------------------------------------------------------------------------------------
# Facts that the receiver of other servers' events needs: rooms, servers, and stored events.
#
# Each is one statement, and none reads the bytes of an event.

SQL_STORED_ROOMS: Final[LiteralString] = """
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


SQL_PENDING_MEMBERSHIP: Final[LiteralString] = fill("""
SELECT e.event_id
FROM rooms r
JOIN principals p ON p.name = $2::text
JOIN memberships m USING (room_nid, principal_nid)
JOIN events e USING (event_nid)
WHERE r.room_id = $1::text AND m.membership IN ({KNOCK}, {INVITE})
""")


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


async def stored_rooms(
    conn: Connection, room_ids: Iterable[str], server_name: str
) -> dict[str, KnownRoom]:
    """Return those of the rooms that the store knows, by id."""
    rows = await conn.fetch(SQL_STORED_ROOMS, list(room_ids), server_name, row=KnownRoom)
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


# --------------------------------------------------------------------------------------------------
# Events that authorise another one: the state before it with its auth chain, or its own chain.
#
# Server-server API, /state_ids and /event_auth. auth_chain.py has the chains of ids alone.

SQL_EVENT_AUTH: Final[LiteralString] = compose(
    """
WITH RECURSIVE
start AS MATERIALIZED (
    SELECT event_nid, room_nid, :auth_nids.call AS auth_events
    FROM events
    WHERE event_id = $1::text
),
-- within the room: a refused event may cite events of other rooms, which its sender may not get
chain (event_nid) AS (
    SELECT unnest(auth_events)
    FROM start
    UNION
    SELECT cited.event_nid
    FROM chain
    CROSS JOIN start
    CROSS JOIN LATERAL (
        SELECT * FROM events
        WHERE event_nid = chain.event_nid AND room_nid + 0 = start.room_nid OFFSET 0
    ) AS e
    CROSS JOIN unnest(:auth_nids.call(e)) AS cited (event_nid)
)
SELECT s.*
FROM start
CROSS JOIN LATERAL (SELECT start.event_nid UNION ALL SELECT event_nid FROM chain) AS wanted
-- one by one: the planner expects a long chain, and would read all rooms
CROSS JOIN LATERAL (
    SELECT s.*
    FROM events e
    JOIN stored_events s USING (event_nid)
    WHERE e.event_nid = wanted.event_nid AND e.room_nid = start.room_nid
    OFFSET 0
) AS s
ORDER BY s.depth, s.event_nid
""",
    AUTH_NIDS,
).sql


@dataclass(frozen=True, slots=True)
class StateIds:
    """The state before an event, and the union of the auth chains of its events.

    Server-server API, /state_ids.
    """

    state_ids: frozenset[EventId]
    auth_chain_ids: frozenset[EventId]


async def state_ids(conn: Connection, event_id: EventId) -> StateIds:
    """Return the ids of the state before an event, and of its auth chain.

    `UnknownEvent`, `StateUnknown` for an outlier.

    Both never change, so two statements need no common snapshot.
    """
    return StateIds(*await state_and_chain_ids(conn, await event_nids_before(conn, event_id)))


async def event_auth(conn: Connection, event_id: EventId) -> list[StoredEvent]:
    """Return the whole auth chain of an event, without itself.

    Also of rejected events and outliers. `UnknownEvent`.
    """
    rows = await conn.fetch(SQL_EVENT_AUTH, event_id, row=StoredEventRow)
    if not rows:
        raise UnknownEvent(event_id)
    return [stored_of(row) for row in rows if row.event_id != event_id]
