"""The edges of one event: parents, auth events, children, and the events that relate to it.

Edges are stored with the child. So children are looked for among the events above an event in
topological order, at most `CHILDREN_SCANNED_MAX` of them. A child is nearly always one of the next.
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.ids import EventId

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
    found = await conn.fetch(SQL_EDGES, event_id, row=EdgeRow)
    return Edges(
        [row for row in found if row.kind == "prev"],
        [row for row in found if row.kind == "auth"],
        await conn.fetchvals(SQL_CHILDREN, event_id, CHILDREN_SCANNED_MAX),
        await conn.fetch(SQL_RELATED, event_id, RELATED_MAX, row=RelatedCountRow),
        await conn.fetch(SQL_REDACTIONS, event_id, row=FoundRedactionRow),
    )
