"""An event with the events around it, and the state there: two statements in one snapshot.

Client-server API, "Event Context".
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import USER_SEES, WITHHELD
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.errors import UnknownEvent
from storage.ids import EventId, RoomId, UserId
from storage.queries.events import (
    TEMPLATE_EVENT,
    StoredEvent,
    StoredEventRow,
    served_at_once,
    stored_of,
)
from storage.queries.filters import (
    ANY_EVENT,
    FILTER_VALUES,
    PART_IS_REQUESTED,
    PART_READER,
    EventFilter,
)
from storage.queries.pagination.page import edge
from storage.queries.pagination.statements import TEMPLATE_RANGE_EVENTS
from storage.queries.state_at import lost

TEMPLATE_CONTEXT: Final[LiteralString] = """
WITH
{reader},
target AS MATERIALIZED (
    SELECT e.event_nid, e.room_nid, e.topological_ordering, e.stream_ordering, reader.*,
        :withheld.of(v) AS withheld, f.*
    FROM reader
    CROSS JOIN filter_of(:types, :not_types, :senders, :not_senders, :contains_url) AS f
    CROSS JOIN events e
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS v
    WHERE e.event_id = :event_id AND (:room_id IS NULL
            OR e.room_nid = (SELECT room_nid FROM rooms WHERE room_id = :room_id))
        AND user_sees(e, :user_sees.of(v))
),
-- the topological ranges of the reader's audiences: the hidden events between them are not read
visible_range AS MATERIALIZED (
    SELECT t.room_nid, t.topological_ordering, t.stream_ordering, t.ignored, t.types, t.not_types,
        t.senders, t.not_senders, t.contains_url, v.*
    FROM target t
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL topological_ranges_of(
        t.room_nid, t.principal_nid, r.out_of_range, t.topological_ordering, :before_max, :after_max
    ) AS v
),
range_before AS (
    SELECT v.*, v.lowest AS lower, 0::bigint AS lower_stream,
        LEAST(v.topological_ordering, v.highest) AS upper,
        CASE WHEN v.highest < v.topological_ordering THEN 9223372036854775807
            ELSE v.stream_ordering - 1 END AS upper_stream
    FROM visible_range v
),
range_after AS (
    SELECT v.*, GREATEST(v.topological_ordering, v.lowest) AS lower,
        CASE WHEN v.lowest > v.topological_ordering THEN 0 ELSE v.stream_ordering + 1
            END AS lower_stream, v.highest AS upper, 9223372036854775807 AS upper_stream
    FROM visible_range v
),
before AS (
    {before}
),
after AS (
    {after}
),
chosen AS (
    SELECT event_nid, withheld, -1 AS side FROM before
    UNION ALL
    SELECT event_nid, withheld, 0 FROM target
    UNION ALL
    SELECT event_nid, withheld, 1 FROM after
)
SELECT chosen.side, (SELECT r.moves FROM target t JOIN rooms r USING (room_nid)) AS moves,
    chosen.withheld, s.*
FROM chosen
JOIN stored_events s USING (event_nid)
ORDER BY s.topological_ordering, s.stream_ordering
"""

PARTS_SIDE: Final[dict[str, LiteralString]] = {
    "columns": """
    e.event_nid, e.topological_ordering, e.stream_ordering, :withheld.of(r) AS withheld
    """,
    "source": "e.room_nid = r.room_nid",
    "which": PART_IS_REQUESTED,
}

SQL_CONTEXT: Final[LiteralString] = compose(
    fill(
        TEMPLATE_CONTEXT,
        reader=PART_READER,
        before=fill(
            TEMPLATE_RANGE_EVENTS,
            ranges="(SELECT * FROM range_before ORDER BY upper DESC)",
            by_range="r.upper DESC,",
            order="DESC",
            limit=":before_max",
            **PARTS_SIDE,
        ),
        after=fill(
            TEMPLATE_RANGE_EVENTS,
            ranges="(SELECT * FROM range_after ORDER BY lower)",
            by_range="r.lower,",
            order="ASC",
            limit=":after_max",
            **PARTS_SIDE,
        ),
    ),
    USER_SEES,
    WITHHELD,
    event_id="text",
    user_id="text",
    before_max="bigint",
    after_max="bigint",
    ignored="text[]",
    **FILTER_VALUES,
    room_id="text",
).sql

TEMPLATE_STATE_AT: Final[LiteralString] = """
SELECT path.state_group, path.is_lost
    OR (entry.event_nid IS NOT NULL AND s.event_nid IS NULL) AS is_lost,
    {event}
FROM events e
JOIN rooms r USING (room_nid)
CROSS JOIN filter_of(:types, :not_types, :senders, :not_senders, :contains_url) AS f
CROSS JOIN LATERAL (
    SELECT w.state_group, bool_or(g.state_group IS NULL) AS is_lost
    FROM (SELECT COALESCE(e.state_group_after, e.state_group_before) AS state_group) AS w
    LEFT JOIN LATERAL state_path(w.state_group) AS step ON true
    LEFT JOIN state_groups g ON g.state_group = step.part
    GROUP BY w.state_group
) AS path
LEFT JOIN LATERAL state_entries(path.state_group) AS entry ON true
LEFT JOIN events s ON s.event_nid = entry.event_nid
WHERE e.event_id = :event_id
    AND (s.event_nid IS NULL
        OR is_wanted(s, f.types, f.not_types, f.senders, f.not_senders, f.contains_url))
"""

SQL_STATE_AT: Final[LiteralString] = compose(
    fill(TEMPLATE_STATE_AT, event=fill(TEMPLATE_EVENT, event="s", room="r")),
    event_id="text",
    **FILTER_VALUES,
).sql


class ContextStateRow(NamedTuple):
    """One event of the state (None: the state is empty).

    ``is_lost``: a row of the group's path, or the event, is missing.
    """

    state_group: int
    is_lost: bool
    event: StoredEventRow | None


class ContextRow(NamedTuple):
    """One event: before (-1), at (0) or after (1) the requested one."""

    side: int
    moves: int
    withheld: bool
    event: StoredEventRow


@dataclass(frozen=True, slots=True)
class Context:
    """An event with the events around it, in topological order.

    ``events_before`` are newest first, ``events_after`` oldest first. ``state`` is that after the
    last event, by event id. ``start`` pages back from the earliest event, ``end`` forward from the
    latest.
    """

    events_before: list[StoredEvent]
    event: StoredEvent
    events_after: list[StoredEvent]
    state: list[StoredEvent]
    start: str
    end: str


async def context(
    conn: Connection,
    event_id: EventId,
    user_id: UserId,
    *,
    limit: int,
    deployment: str,
    room_id: RoomId | None = None,
    ignored: list[UserId] | None = None,
    event_filter: EventFilter = ANY_EVENT,
) -> Context:
    """Return at most ``limit`` visible events around one, half of them before it.

    `UnknownEvent` also where the user may not see it, or where it is not of ``room_id``.

    `StorageCorrupt` where the state cannot be read.

    Events of ``ignored`` senders are left out, but for state. So are events that do not
    pass ``event_filter``, also in the state. Neither applies to the requested event. There are
    fewer events where they have too many values (`served_at_once`).
    """
    before = limit // 2
    rows = await conn.fetch(
        SQL_CONTEXT,
        event_id,
        user_id,
        before,
        limit - before,
        ignored,
        *event_filter.arguments,
        room_id,
        row=ContextRow,
    )
    if not rows:
        raise UnknownEvent(event_id)
    events = [stored_of(row.event, withheld=row.withheld) for row in rows]
    event_index = next(index for index, row in enumerate(rows) if row.side == 0)
    nearest = sorted(range(len(events)), key=lambda index: abs(index - event_index))
    served = nearest[: await served_at_once([events[index] for index in nearest])]
    events, event_index = events[min(served) : max(served) + 1], event_index - min(served)
    state = await _state_at(conn, events[-1].event_id, event_filter)
    return Context(
        events_before=events[:event_index][::-1],
        event=events[event_index],
        events_after=events[event_index + 1 :],
        state=state,
        start=edge(events[0], "b", first=False, reorder_count=rows[0].moves).print(deployment),
        end=edge(events[-1], "f", first=False, reorder_count=rows[0].moves).print(deployment),
    )


async def _state_at(
    conn: Connection, event_id: EventId, event_filter: EventFilter
) -> list[StoredEvent]:
    """Return the events that pass ``event_filter`` of the state after an event, by event id.

    `StorageCorrupt` where it cannot be read.
    """
    rows = await conn.fetch(SQL_STATE_AT, event_id, *event_filter.arguments, row=ContextStateRow)
    if any(row.is_lost for row in rows):
        raise lost(rows[0].state_group, event_id)
    events = [stored_of(row.event) for row in rows if row.event is not None]
    return sorted(events, key=attrgetter("event_id"))
