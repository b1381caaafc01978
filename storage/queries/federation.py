"""What other servers ask for: history, what they miss, and how an event was authorised.

Server-server API, "Backfilling and retrieving missing events", "Retrieving events". A walk over the graph is one statement
whose recursion keeps its queue in an array: one step reads one event by its key, so what is read is bounded by what is
answered and by `Config.traversal_rows_max`, never by the size of the room.
"""

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import EventId, RoomId, ServerName
from storage.queries.events import StoredEvent, StoredRow, stored
from storage.queries.state import require_room

SQL_BACKFILL: Final[LiteralString] = """
WITH RECURSIVE
server AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $4::text), 0) AS principal_nid
),
walk AS (  -- again and again the latest event of the front; all its children have had their turn, so none comes twice
    SELECT 0 AS step, 0 AS found, r.room_nid, array_agg(e.event_nid) AS front, NULL::bigint AS event_nid
    FROM rooms r
    JOIN events e USING (room_nid)
    WHERE r.room_id = $1::text AND e.event_id = ANY($2::text[]) AND NOT e.outlier
    GROUP BY r.room_nid
    UNION ALL
    SELECT w.step + 1, w.found + (e.rejected IS NULL)::int, w.room_nid,
        array_remove(w.front, e.event_nid) || e.prev_events, e.event_nid
    FROM walk w
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.prev_events, e.rejected
        FROM events e
        WHERE e.event_nid = ANY(w.front) AND NOT e.outlier
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT 1
    ) AS e
    WHERE w.found < $3::int AND w.step < $5::int
)
SELECT $4::text IS NOT NULL AND (
        NOT server_sees(e, sight.own_audiences, sight.shared_audiences, sight.world_audiences)
        OR (NOT was_there(e, sight.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid))
    ) AS withheld, s.*
FROM server
CROSS JOIN walk w
JOIN events e ON e.event_nid = w.event_nid AND e.rejected IS NULL
CROSS JOIN LATERAL sight_of(w.room_nid, server.principal_nid) AS sight
JOIN stored_events s ON s.event_nid = e.event_nid
ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
"""

SQL_MISSING: Final[LiteralString] = """
WITH RECURSIVE
server AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $6::text), 0) AS principal_nid
),
latest AS MATERIALIZED (
    SELECT r.room_nid, e.event_nid, i.place
    FROM rooms r
    JOIN events e USING (room_nid)
    JOIN unnest($3::text[]) WITH ORDINALITY AS i (event_id, place) USING (event_id)
    WHERE r.room_id = $1::text AND NOT e.outlier
),
earliest AS MATERIALIZED (
    SELECT event_nid
    FROM events
    WHERE event_id = ANY($2::text[])
),
walk AS (  -- breadth first: the parents of the first event of the queue, in the order in which it names them
    SELECT 0 AS step, 0 AS found, l.room_nid, NULL::bigint[] AS given,
        array_agg(l.event_nid ORDER BY l.place) FILTER (WHERE l.event_nid NOT IN (SELECT event_nid FROM earliest)) AS queue,
        array_agg(l.event_nid) || (SELECT array_agg(event_nid) FROM earliest) AS seen
    FROM latest l
    GROUP BY l.room_nid
    UNION ALL
    SELECT w.step + 1, w.found + COALESCE(cardinality(parents.given), 0), w.room_nid, parents.given,
        w.queue[2:] || parents.nids, w.seen || parents.nids
    FROM walk w
    JOIN events e ON e.event_nid = w.queue[1]
    CROSS JOIN LATERAL (
        SELECT array_agg(p.event_nid ORDER BY i.place) AS nids,
            array_agg(p.event_nid ORDER BY i.place) FILTER (WHERE p.rejected IS NULL AND p.depth >= $5::bigint) AS given
        FROM unnest(e.prev_events) WITH ORDINALITY AS i (event_nid, place)
        JOIN events p ON p.event_nid = i.event_nid AND NOT p.outlier
        WHERE i.event_nid <> ALL (w.seen)
    ) AS parents
    WHERE w.found < $4::int AND w.step < $7::int
),
chosen AS (
    SELECT w.room_nid, i.event_nid
    FROM walk w
    CROSS JOIN unnest(w.given) WITH ORDINALITY AS i (event_nid, place)
    ORDER BY w.step, i.place
    LIMIT $4::int
)
SELECT $6::text IS NOT NULL AND (
        NOT server_sees(e, sight.own_audiences, sight.shared_audiences, sight.world_audiences)
        OR (NOT was_there(e, sight.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid))
    ) AS withheld, s.*
FROM server
CROSS JOIN chosen
JOIN events e USING (event_nid)
CROSS JOIN LATERAL sight_of(chosen.room_nid, server.principal_nid) AS sight
JOIN stored_events s USING (event_nid)
ORDER BY e.topological_ordering, e.stream_ordering
"""


class TraversalRow(NamedTuple):
    """One event for another server, or a user; `withheld`: they may have the redacted form only."""

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
    json: bytes


EVENT: Final = TraversalRow._fields.index("event_nid")
"""Where the columns of the event begin."""


async def backfill(
    conn: Connection, room_id: RoomId, from_ids: Sequence[EventId], limit: int, *, server_name: ServerName | None, rows_max: int
) -> list[StoredEvent]:
    """These events and their ancestors, newest first in topological order; rejected ones are walked through and left out.

    What ``server_name`` may not see comes redacted; None sees all. Ids that are not held are passed over. `UnknownRoom`.
    """
    rows = await conn.fetch(SQL_BACKFILL, room_id, from_ids, limit, server_name, rows_max, row=TraversalRow)
    return await _answer(conn, room_id, rows)


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
    """What lies between two sets of events, both left out: found breadth first from the latest, given oldest first.

    ``min_depth`` is about the depth that senders claim. Ids that are not held are no error. `UnknownRoom`.
    """
    rows = await conn.fetch(SQL_MISSING, room_id, list(earliest), list(latest), limit, min_depth, server_name, rows_max, row=TraversalRow)
    return await _answer(conn, room_id, rows)


async def _answer(conn: Connection, room_id: RoomId, rows: Sequence[TraversalRow]) -> list[StoredEvent]:
    if not rows:
        await require_room(conn, room_id)
    return [stored(StoredRow._make(row[EVENT:]), withheld=row.withheld) for row in rows]
