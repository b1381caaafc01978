"""Events without their content, a line each: by id, and windows of a room in topological order.

A window continues from a position in the order of pages, (topological ordering, stream ordering).
It has rejected and soft-failed events, too. Its edges are the parents as numbers, so that a reader
can draw the graph: a parent outside of the window is below it, or it is missing.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS, PREV_NIDS, USER_SEES
from storage.database.connection import Connection, require_room
from storage.database.placeholders import compose, fill
from storage.ids import EventId, RoomId, UserId

TEMPLATE_LINES: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.event_id, r.room_id, t.type, k.state_key, s.name AS sender,
    e.stream_ordering, e.topological_ordering,
    claimed_depth(e.depth, e.topological_ordering) AS depth, e.origin_server_ts, e.received_ts,
    e.membership, e.outlier, e.backfilled, e.soft_failed, e.ineffective, e.redacted_form,
    e.redacted_by IS NOT NULL AS is_redacted, e.rejected, e.refused,
    octet_length(e.json) AS stored_bytes, edges.prev_events,
    ARRAY(
        SELECT m.event_nid FROM missing_events m WHERE m.event_nid = ANY(edges.prev_events)
    ) AS missing_parents
FROM {source} AS e
CROSS JOIN LATERAL (SELECT :prev_nids.call(e) AS prev_events) AS edges
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
JOIN principals s ON s.principal_nid = e.sender_nid
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
ORDER BY e.topological_ordering {order} NULLS LAST, e.stream_ordering {order}, e.event_nid
""",
    PREV_NIDS,
).sql

TEMPLATE_WINDOW: Final[LiteralString] = """
(
    SELECT e.*
    FROM events e
    WHERE e.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text)
        AND NOT e.outlier
        AND (e.topological_ordering, e.stream_ordering) {beyond} ($2::bigint, $3::bigint)
    ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT $4::bigint
)
"""

SQL_BY_ID: Final[LiteralString] = fill(
    TEMPLATE_LINES,
    source="""
    (
        SELECT e.*
        FROM unnest($1::text[]) AS one (id)
        CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = one.id OFFSET 0) AS e
    )
    """,
    order="DESC",
)

SQL_OLDER: Final[LiteralString] = fill(
    TEMPLATE_LINES, source=fill(TEMPLATE_WINDOW, beyond="<", order="DESC"), order="DESC"
)

SQL_NEWER: Final[LiteralString] = fill(
    TEMPLATE_LINES, source=fill(TEMPLATE_WINDOW, beyond=">", order="ASC"), order="ASC"
)

SQL_OUTLIERS: Final[LiteralString] = fill(
    TEMPLATE_LINES,
    source="""
    (
        SELECT e.*
        FROM events e
        WHERE e.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text) AND e.outlier
        ORDER BY e.event_nid DESC
        LIMIT $2::bigint
    )
    """,
    order="DESC",
)

TOP: Final = (2**63 - 1, 2**63 - 1)
"""The position above all events of a room."""

BOTTOM: Final = (-1, -1)
"""The position below all events of a room."""

WindowPosition = tuple[int, int]
"""A position: topological ordering, stream ordering."""


class EventLine(NamedTuple):
    """An event without its content.

    ``parents`` and ``missing_parents`` are nids, as ``event_nid``. ``membership`` is a number of
    `storage.database.names`. Times are milliseconds since 1970.
    """

    event_nid: int
    event_id: EventId
    room_id: RoomId
    type: str
    state_key: str | None
    sender: str
    stream_ordering: int | None
    topological_ordering: int | None
    depth: int
    origin_server_ts: int
    received_ts: int
    membership: int | None
    outlier: bool
    backfilled: bool
    soft_failed: bool
    ineffective: bool
    redacted_form: bool
    is_redacted: bool
    rejected: str | None
    refused: str | None
    stored_bytes: int
    prev_events: list[int]
    missing_parents: list[int]

    @property
    def position(self) -> WindowPosition:
        """Return its position in a window; that of an outlier is below all."""
        return self.topological_ordering or 0, self.stream_ordering or 0


async def lines_by_id(conn: Connection, event_ids: Iterable[EventId]) -> dict[EventId, EventLine]:
    """Return those of these events that are stored, by id, in topological order, latest first."""
    rows = await conn.fetch(SQL_BY_ID, list(event_ids), row=EventLine)
    return {row.event_id: row for row in rows}


async def window(
    conn: Connection,
    room_id: RoomId,
    position: WindowPosition = TOP,
    *,
    direction: Literal["below", "above"] = "below",
    limit: int = 100,
) -> list[EventLine]:
    """Return the events of a room next to a position, without an event there, latest first.

    `UnknownRoom`.
    """
    if direction == "below":
        rows = await conn.fetch(SQL_OLDER, room_id, *position, limit, row=EventLine)
    else:
        rows = await conn.fetch(SQL_NEWER, room_id, *position, limit, row=EventLine)
        rows.reverse()
    if not rows:
        await require_room(conn, room_id)
    return rows


async def outliers(conn: Connection, room_id: RoomId, limit: int = 100) -> list[EventLine]:
    """Return some outliers of a room, the last stored first. `UnknownRoom`."""
    rows = await conn.fetch(SQL_OUTLIERS, room_id, limit, row=EventLine)
    if not rows:
        await require_room(conn, room_id)
    return rows


# --------------------------------------------------------------------------------------------------
# The edges of one event: parents, auth events, children, and the events that relate to it.
#
# Edges are stored with the child. So children are looked for among the events above an event in
# topological order, at most `CHILDREN_SCANNED_MAX` of them. A child is nearly always one of the
# next.

CHILDREN_SCANNED_MAX: Final = 2_000

SQL_EDGES: Final[LiteralString] = compose(
    """
WITH origin AS MATERIALIZED (
    SELECT :prev_nids.call AS prev_events, :auth_nids.call AS auth_events
    FROM events
    WHERE event_id = $1::text
),
edge AS MATERIALIZED (
    SELECT 'prev' AS kind, p.event_nid, p.place
    FROM origin
    CROSS JOIN unnest(origin.prev_events) WITH ORDINALITY AS p (event_nid, place)
    UNION ALL
    SELECT 'auth', p.event_nid, p.place
    FROM origin
    CROSS JOIN unnest(origin.auth_events) WITH ORDINALITY AS p (event_nid, place)
)
SELECT edge.kind, COALESCE(e.event_id, m.event_id) AS event_id,
    e.event_nid IS NOT NULL AS is_stored
FROM edge
LEFT JOIN events e ON e.event_nid = edge.event_nid
LEFT JOIN missing_events m ON m.event_nid = edge.event_nid
ORDER BY edge.kind DESC, edge.place
""",
    PREV_NIDS,
    AUTH_NIDS,
).sql

SQL_CHILDREN: Final[LiteralString] = compose(
    """
SELECT c.event_id
FROM events p
CROSS JOIN LATERAL (
    SELECT e.event_id, :prev_nids.call(e) AS prev_events, e.topological_ordering,
        e.stream_ordering
    FROM events e
    WHERE e.room_nid = p.room_nid AND NOT e.outlier
        AND e.topological_ordering > p.topological_ordering
    ORDER BY e.topological_ordering, e.stream_ordering
    LIMIT $2::bigint
) AS c
WHERE p.event_id = $1::text AND p.event_nid = ANY(c.prev_events)
ORDER BY c.topological_ordering, c.stream_ordering
""",
    PREV_NIDS,
).sql

SQL_RELATED: Final[LiteralString] = """
SELECT t.type AS rel_type, count(*)::int AS events
FROM (
    SELECT e.rel_type_nid
    FROM events target
    JOIN events e ON e.relates_to = relation_key(target.event_id) AND NOT e.outlier
        AND e.room_nid = target.room_nid
    WHERE target.event_id = $1::text
    LIMIT $2::bigint
) AS related
JOIN event_types t ON t.type_nid = related.rel_type_nid
GROUP BY t.type
ORDER BY t.type
"""

SQL_REDACTIONS: Final[LiteralString] = """
SELECT b.event_id, true AS is_effective
FROM events e
JOIN events b ON b.event_nid = e.redacted_by
WHERE e.event_id = $1::text
UNION ALL
SELECT b.event_id, false
FROM waiting_redactions w
JOIN events b ON b.event_nid = w.redaction_nid
WHERE w.target_event_id = $1::text
"""

RELATED_MAX: Final = 10_000


class EdgeRow(NamedTuple):
    """One edge: "prev" or "auth". ``event_id`` None: its row is lost."""

    kind: str
    event_id: EventId | None
    is_stored: bool


class RelatedCountRow(NamedTuple):
    """The number of events with one type of relation."""

    rel_type: str
    events: int


class FoundRedactionRow(NamedTuple):
    """A redaction of an event. One that is not effective waits for the event."""

    event_id: EventId
    is_effective: bool


class Edges(NamedTuple):
    """The neighbours of an event, in the order of the PDU; children in topological order."""

    parents: Sequence[EdgeRow]
    auth_events: Sequence[EdgeRow]
    children: Sequence[EventId]
    related: Sequence[RelatedCountRow]
    redactions: Sequence[FoundRedactionRow]


async def edges(conn: Connection, event_id: EventId) -> Edges:
    """Return the edges of an event; all are empty if it is not stored. Four statements."""
    rows = await conn.fetch(SQL_EDGES, event_id, row=EdgeRow)
    return Edges(
        [row for row in rows if row.kind == "prev"],
        [row for row in rows if row.kind == "auth"],
        await conn.fetchvals(SQL_CHILDREN, event_id, CHILDREN_SCANNED_MAX),
        await conn.fetch(SQL_RELATED, event_id, RELATED_MAX, row=RelatedCountRow),
        await conn.fetch(SQL_REDACTIONS, event_id, row=FoundRedactionRow),
    )


# --------------------------------------------------------------------------------------------------
# The ranges of audiences of a user or a server in its rooms, and where they begin and end.
#
# An audience is a number; see docs/internals/visibility.md. A number of the main line also has the
# topological position at which it was opened. So each range is roughly a range of the room's
# history.

SQL_AUDIENCES: Final[LiteralString] = """
SELECT r.room_id, lower(ranges.one) AS first_audience, upper(ranges.one) AS end_audience,
    (
        SELECT a.opened_topological
        FROM audiences a
        WHERE a.room_nid = r.room_nid AND a.audience <= lower(ranges.one)
            AND a.opened_topological IS NOT NULL
        ORDER BY a.audience DESC
        LIMIT 1
    ) AS first_topological,
    (
        SELECT a.opened_topological
        FROM audiences a
        WHERE a.room_nid = r.room_nid AND a.audience >= upper(ranges.one)
            AND a.opened_topological IS NOT NULL
        ORDER BY a.audience
        LIMIT 1
    ) AS end_topological,
    r.max_topological_ordering, r.current_audience
FROM principals p
JOIN LATERAL (
    SELECT v.room_nid, v.principal_nid
    FROM visibility v
    WHERE v.principal_nid = p.principal_nid AND v.room_nid = ANY(ARRAY(
        SELECT room_nid FROM rooms WHERE room_id = ANY($2::text[])
    ))
) AS v ON true
JOIN rooms r USING (room_nid)
JOIN whole_visibility w ON w.room_nid = v.room_nid AND w.principal_nid = v.principal_nid
CROSS JOIN LATERAL (SELECT one FROM unnest(w.audiences) AS one LIMIT $3::bigint) AS ranges
WHERE p.name = $1::text
ORDER BY r.room_id, lower(ranges.one)
"""

RANGES_MAX: Final = 64
"""Ranges that are read of each room."""


class PrincipalRangeRow(NamedTuple):
    """A range of audiences of one room.

    ``end_audience`` is not a part of it; None: the range goes on. ``first_topological`` and
    ``end_topological`` are the positions at which the audiences of the main line were opened;
    None: before all, or after all.
    """

    room_id: RoomId
    first_audience: int | None
    end_audience: int | None
    first_topological: int | None
    end_topological: int | None
    max_topological_ordering: int
    current_audience: int


async def audience_ranges(
    conn: Connection, reader: str, room_ids: list[RoomId]
) -> list[PrincipalRangeRow]:
    """Return the ranges of a user or server in these rooms, in order."""
    return await conn.fetch(SQL_AUDIENCES, reader, room_ids, RANGES_MAX, row=PrincipalRangeRow)


# --------------------------------------------------------------------------------------------------
# The changes of a room's current state, latest first: of all keys, or of one.
#
# A change has the event at its position. Where that is not the new value itself, resolution made
# the change: the key went back to an earlier value, lost it, or took one that had arrived before.
# Only the latest changes of the room are read (`SCANNED_MAX`).

HISTORY_SCANNED_MAX: Final = 5_000

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
        SQL_CHANGES, room_id, type_, state_key, HISTORY_SCANNED_MAX, limit, row=KeyChangeRow
    )


# --------------------------------------------------------------------------------------------------
# Merges: the latest events of a room with several parents, and whether their states differed.
#
# Only the latest events are looked at (`SCANNED_MAX`), in topological order. Several parents are
# always an array: `storage.persist.write.events`.

MERGES_SCANNED_MAX: Final = 2_000

SQL_MERGES: Final[LiteralString] = """
SELECT e.event_id, s.name AS sender, e.topological_ordering, e.stream_ordering, e.origin_server_ts,
    cardinality(e.prev_events) AS parents,
    (
        SELECT count(DISTINCT COALESCE(p.state_group_after, p.state_group_before))::int
        FROM events p
        WHERE p.event_nid = ANY(e.prev_events)
    ) AS states
FROM (
    SELECT e.event_id, e.sender_nid, e.topological_ordering, e.stream_ordering, e.origin_server_ts,
        e.prev_events
    FROM events e
    WHERE e.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text) AND NOT e.outlier
    ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $2::bigint
) AS e
JOIN principals s ON s.principal_nid = e.sender_nid
WHERE cardinality(e.prev_events) > 1
ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
"""


class MergeRow(NamedTuple):
    """An event with several ``parents``, whose stored ones have so many different ``states``."""

    event_id: EventId
    sender: str
    topological_ordering: int
    stream_ordering: int
    origin_server_ts: int
    parents: int
    states: int


async def merges(conn: Connection, room_id: RoomId) -> list[MergeRow]:
    """Return the merges among the latest events of a room, latest first."""
    return await conn.fetch(SQL_MERGES, room_id, MERGES_SCANNED_MAX, row=MergeRow)


# --------------------------------------------------------------------------------------------------
# The local users of a room, and whether an event is visible to each.
#
# They are read from the table of visibility, in the order of their numbers. Users without a row
# there were never members: they see world-readable events only.

SQL_READERS: Final[LiteralString] = compose(
    """
SELECT p.name AS user_id,
    COALESCE(user_sees(e, :user_sees.of(s)), false) AS is_visible
FROM events e
CROSS JOIN LATERAL (
    SELECT v.principal_nid
    FROM visibility v
    WHERE v.room_nid = e.room_nid AND v.principal_nid > {PRINCIPAL_SHARED}
    ORDER BY v.principal_nid
    LIMIT $2::bigint
) AS v
JOIN principals p USING (principal_nid)
CROSS JOIN LATERAL visibility_of(e.room_nid, v.principal_nid) AS s
WHERE e.event_id = $1::text AND starts_with(p.name, '@')
ORDER BY p.name
""",
    USER_SEES,
).sql

READERS_MAX: Final = 500


class ReaderRow(NamedTuple):
    """A local user who is or was a member, or is invited, and whether they may see the event."""

    user_id: UserId
    is_visible: bool


async def readers(conn: Connection, event_id: EventId) -> list[ReaderRow]:
    """Return local users with a row of visibility in the room of an event: at most so many rows."""
    return await conn.fetch(SQL_READERS, event_id, READERS_MAX, row=ReaderRow)
