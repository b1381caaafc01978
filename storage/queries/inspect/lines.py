"""Events without their content, a line each: by id, and windows of a room in topological order.

A window continues from a position in the order of pages, (topological ordering, stream ordering).
It has rejected and soft-failed events, too. Its edges are the parents as numbers, so that a reader
can draw the graph: a parent outside of the window is below it, or it is missing.
"""

from collections.abc import Iterable
from typing import Final, Literal, LiteralString, NamedTuple

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.database.rooms import require_room
from storage.database.sql_template import fill
from storage.ids import EventId, RoomId

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

SQL_BELOW: Final[LiteralString] = fill(
    TEMPLATE_LINES, source=fill(TEMPLATE_WINDOW, beyond="<", order="DESC"), order="DESC"
)

SQL_ABOVE: Final[LiteralString] = fill(
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

Place = tuple[int, int]
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
    def place(self) -> Place:
        """Return its position in a window; that of an outlier is below all."""
        return self.topological_ordering or 0, self.stream_ordering or 0

    @property
    def is_accepted(self) -> bool:
        """Return whether it is neither rejected nor soft-failed, and no outlier."""
        return not (self.soft_failed or self.outlier or self.rejected is not None)


async def lines_by_id(conn: Connection, event_ids: Iterable[EventId]) -> dict[EventId, EventLine]:
    """Return those of these events that are stored, by id, in topological order, latest first."""
    rows = await conn.fetch(SQL_BY_ID, list(event_ids), row=EventLine)
    return {row.event_id: row for row in rows}


async def window(
    conn: Connection,
    room_id: RoomId,
    place: Place = TOP,
    *,
    direction: Literal["below", "above"] = "below",
    limit: int = 100,
) -> list[EventLine]:
    """Return the events of a room next to a position, without an event there, latest first.

    `UnknownRoom`.
    """
    if direction == "below":
        rows = await conn.fetch(SQL_BELOW, room_id, *place, limit, row=EventLine)
    else:
        rows = await conn.fetch(SQL_ABOVE, room_id, *place, limit, row=EventLine)
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
