"""Federation requests for history: backfill, missing events, and whether a server is in a room.

Server-server API, "Backfilling and retrieving missing events", "Retrieving events". A walk over the
graph is one statement (`ancestors_of` and `events_between` in the schema). One step reads the
parents of one event by their keys. So the rows read are bounded by the response, 20 parents to an
event, and by `Config.traversal_rows_max`, never by the size of the room. A walk stays in the room,
whatever parents events name.
"""

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes
from storage.database.connection import Connection
from storage.database.rooms import require_room
from storage.errors import UnknownRoom
from storage.ids import EventId, RoomId, ServerName
from storage.queries.events import StoredEvent, StoredEventRow, stored
from storage.queries.partial_rooms import refuse_partial

SQL_BACKFILL: Final[LiteralString] = """
WITH
server AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $4::text),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, v.*
    FROM server
    CROSS JOIN rooms r
    CROSS JOIN LATERAL visibility_of(r.room_nid, server.principal_nid) AS v
    WHERE r.room_id = $1::text AND ($4::text IS NULL OR NOT r.is_partial)
),
found AS MATERIALIZED (
    SELECT walk.event_nid
    FROM room r
    CROSS JOIN LATERAL ancestors_of(r.room_nid,
        ARRAY(
            SELECT e.event_nid
            FROM unnest($2::text[]) AS one (id)
            CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS e
        ), $3::int, $5::int) AS walk (event_nid)
)
SELECT $4::text IS NOT NULL AND (
        NOT server_sees(e, room.own_audiences, room.shared_audiences, room.world_audiences,
            room.reader_nid, room.unread)
        OR (NOT was_there(e, room.joined_since, room.joined_audiences)
            AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
            AND NOT was_there_before(e, room.reader_nid, room.unread))
    ) AS withheld,
    e.event_nid, e.event_id, room.room_id, room.room_version, e.stream_ordering,
        e.topological_ordering, claimed_depth(e.depth, e.topological_ordering) AS depth,
    (SELECT b.event_id FROM events b WHERE b.event_nid = e.redacted_by) AS redacted_by,
    e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding, e.json
FROM room
CROSS JOIN found
JOIN events e USING (event_nid)
WHERE $4::text IS NULL
    OR server_gets(e, room.joined_audiences, room.world_audiences, room.reader_nid, room.unread)
ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
"""

SQL_MISSING: Final[LiteralString] = """
WITH
server AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $6::text),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, v.*
    FROM server
    CROSS JOIN rooms r
    CROSS JOIN LATERAL visibility_of(r.room_nid, server.principal_nid) AS v
    WHERE r.room_id = $1::text AND ($6::text IS NULL OR NOT r.is_partial)
),
found AS MATERIALIZED (
    SELECT walk.event_nid
    FROM room r
    CROSS JOIN LATERAL events_between(
        r.room_nid,
        ARRAY(
            SELECT e.event_nid
            FROM unnest($2::text[]) AS one (id)
            CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS e
        ),
        ARRAY(
            SELECT e.event_nid
            FROM unnest($3::text[]) WITH ORDINALITY AS one (id, place)
            CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS e
            ORDER BY one.place
        ),
        $4::int, $5::bigint, $7::int
    ) AS walk (event_nid)
)
SELECT $6::text IS NOT NULL AND (
        NOT server_sees(e, room.own_audiences, room.shared_audiences, room.world_audiences,
            room.reader_nid, room.unread)
        OR (NOT was_there(e, room.joined_since, room.joined_audiences)
            AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
            AND NOT was_there_before(e, room.reader_nid, room.unread))
    ) AS withheld,
    e.event_nid, e.event_id, room.room_id, room.room_version, e.stream_ordering,
        e.topological_ordering, claimed_depth(e.depth, e.topological_ordering) AS depth,
    (SELECT b.event_id FROM events b WHERE b.event_nid = e.redacted_by) AS redacted_by,
    e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding, e.json
FROM room
CROSS JOIN found
JOIN events e USING (event_nid)
WHERE $6::text IS NULL
    OR server_gets(e, room.joined_audiences, room.world_audiences, room.reader_nid, room.unread)
ORDER BY e.topological_ordering, e.stream_ordering
"""

SQL_IS_RESIDENT: Final[LiteralString] = """
SELECT CASE WHEN r.is_partial THEN EXISTS (
        -- in the room before the join, and no user of it has left since
        SELECT
        FROM partial_rooms q
        WHERE q.room_nid = r.room_nid AND $2::text = ANY(q.servers) AND NOT EXISTS (
            SELECT
            FROM current_state c
            JOIN state_keys k USING (state_key_nid)
            WHERE c.room_nid = r.room_nid AND c.membership <> 5
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
"""


class TraversalRow(NamedTuple):
    """One event for a server or a user. `withheld`: they get the redacted form only."""

    withheld: bool
    event_nid: int
    event_id: str
    room_id: str
    room_version: str
    stream_ordering: int | None
    topological_ordering: int | None
    depth: int
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool
    outlier: bool
    redacted_form: bool
    encoding: int
    json: StoredBytes


EVENT: Final = TraversalRow._fields.index("event_nid")
"""The first column of the event."""


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
        SQL_BACKFILL, room_id, from_ids, limit, server_name, rows_max, row=TraversalRow
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
        row=TraversalRow,
    )
    return await _stored(conn, room_id, rows, server_name)


async def is_resident(conn: Connection, server_name: ServerName, room_id: RoomId) -> bool:
    """Return whether a user of the server is joined in the room's current state. `UnknownRoom`."""
    found = await conn.fetchval(SQL_IS_RESIDENT, room_id, server_name)
    if found is None:
        raise UnknownRoom(room_id)
    return bool(found)


async def _stored(
    conn: Connection, room_id: RoomId, rows: Sequence[TraversalRow], server_name: ServerName | None
) -> list[StoredEvent]:
    sent = server_name is not None
    if not rows:
        await (refuse_partial if sent else require_room)(conn, room_id)
    return [
        stored(StoredEventRow._make(row[EVENT:]), withheld=row.withheld, sent=sent) for row in rows
    ]
