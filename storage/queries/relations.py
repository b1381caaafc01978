"""The events that relate to an event: edits, reactions, references, threads.

Client-server API, "Event relationships". Order and tokens are those of `messages`: a page is one
statement, or two after moves. A relation counts if the user may see the event, in the same room,
and it is neither redacted nor shown redacted (its sender was erased). With `recurse` a page also
has the events that relate to those, down to `RECURSION_DEPTH`, under the same filters.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, LiteralString, NamedTuple, TypeVar

from storage.database.columns import USER_SEES, WHOLE
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.errors import InputError, UnknownEvent
from storage.ids import EventId, RoomId, UserId
from storage.queries.context import Context
from storage.queries.events import (
    Aggregations,
    StoredEvent,
    StoredEventRow,
    ThreadSummary,
    stored_of,
)
from storage.queries.filters import PART_READER, TEMPLATE_RELATION_IS_VISIBLE
from storage.queries.pagination.page import Page, PageRange, page_of
from storage.queries.pagination.statements import (
    PageRow,
    PageStatements,
    fetch_page,
    page_statements,
)

RECURSION_DEPTH: Final = 3
"""Depth of a recursive request. The specification recommends at least three."""

TEMPLATE_ORIGIN: Final[LiteralString] = """
origin AS MATERIALIZED (
    SELECT e.event_nid, relation_key(e.event_id) AS key, e.room_nid, r.room_id, r.room_version,
        r.moves, reader.ignored,
        (SELECT type_nid FROM event_types WHERE type = :rel_type) AS wanted_rel_type_nid,
        (SELECT type_nid FROM event_types WHERE type = :event_type) AS wanted_type_nid, v.*
    FROM reader
    CROSS JOIN events e
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS v
    WHERE e.event_id = :event_id {and_not_reordered}
        AND (:in_room IS NULL OR r.room_id = :in_room)
        AND user_sees(e, :user_sees.of(v))
)
"""
"""The event that others relate to. `:in_room`: its room, or NULL."""

TEMPLATE_DIRECT: Final[LiteralString] = """
WITH RECURSIVE
{reader},
{origin},
found AS (  -- the types of relations to it: the index leads from each to the next one
    SELECT (
        SELECT e.rel_type_nid FROM events e WHERE e.relates_to = r.key AND NOT e.outlier
            ORDER BY e.rel_type_nid LIMIT 1
    ) AS rel_type_nid, r.key
    FROM origin r
    WHERE :rel_type IS NULL
    UNION ALL
    SELECT (
        SELECT e.rel_type_nid
        FROM events e
        WHERE e.relates_to = f.key AND e.rel_type_nid > f.rel_type_nid AND NOT e.outlier
        ORDER BY e.rel_type_nid
        LIMIT 1
    ), f.key
    FROM found f
    WHERE f.rel_type_nid IS NOT NULL
),
visible_range AS MATERIALIZED (  -- the whole order, for each type
    SELECT r.*, kind.rel_type_nid, 0::bigint AS lowest, 9223372036854775807 AS highest
    FROM origin r
    CROSS JOIN (
        SELECT rel_type_nid FROM found
        UNION ALL
        SELECT wanted_rel_type_nid FROM origin
    ) AS kind
    WHERE kind.rel_type_nid IS NOT NULL
),
{reordered}
{page_range},
page AS MATERIALIZED (
    {page}
)
SELECT
    {page_columns}
FROM origin r
LEFT JOIN page ON true
ORDER BY page.topological_ordering {order}, page.stream_ordering {order}
"""

TEMPLATE_RECURSIVE: Final[LiteralString] = """
WITH RECURSIVE
{reader},
{origin},
-- level by level, not through hidden events. An event relates to one other event: the only cycles
-- are those by the origin
walk AS (
    SELECT r.event_nid, r.key, 0 AS level, true AS shown
    FROM origin r
    UNION ALL
    SELECT e.event_nid, e.key, w.level + 1, e.shown
    FROM walk w
    CROSS JOIN origin r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, relation_key(e.event_id) AS key, ({is_shown}) AS shown
        FROM events e
        WHERE e.relates_to = w.key AND e.room_nid + 0 = r.room_nid AND NOT e.outlier
            AND e.event_nid <> r.event_nid
            AND (:rel_type IS NULL OR e.rel_type_nid = r.wanted_rel_type_nid)
            AND (:event_type IS NULL OR e.type_nid = r.wanted_type_nid)
        OFFSET 0
    ) AS e
    WHERE w.shown AND w.level < :levels
),
found AS (  -- stops the walk once it has read that many rows
    SELECT event_nid, level, shown
    FROM walk
    LIMIT :rows_max
),
{reordered}
page AS MATERIALIZED (
    SELECT
        {columns}
    FROM found f
    JOIN events e USING (event_nid)
    WHERE f.shown AND f.level > 0
        AND ((e.topological_ordering, e.stream_ordering) <= (:upper, :upper_stream) {or_brought})
        AND (e.backfilled OR e.stream_ordering <= :upper_live)
        AND {is_ahead}
    ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT :page_max + 1
)
SELECT
    {page_columns}
FROM origin r
LEFT JOIN page ON true
ORDER BY page.topological_ordering {order}, page.stream_ordering {order}
"""
"""`:rows_max`: of the walk. `:levels`: `RECURSION_DEPTH`."""

PARTS_RELATIONS: Final[dict[str, LiteralString]] = {
    "reader": PART_READER,
    "origin": TEMPLATE_ORIGIN,
    "lowest": "CASE WHEN :lower_live = 9223372036854775807 THEN :lower ELSE :above END",
    "ranges": "page_range",
    "by_range": "",
    "once": "",
    # + 0: see `TEMPLATE_BUNDLES`
    "source": """
e.relates_to = r.key AND e.rel_type_nid = r.rel_type_nid AND e.room_nid + 0 = r.room_nid
    AND (:event_type IS NULL OR e.type_nid = r.wanted_type_nid)
    """,
    "is_shown": fill(TEMPLATE_RELATION_IS_VISIBLE, reader="r"),
    "and_columns": "",
}

RELATION_VALUES: Final[dict[str, str]] = {
    "event_id": "text",
    "in_room": "text",
    "user_id": "text",
    "ignored": "text[]",
    "rel_type": "text",
    "event_type": "text",
}

SQL_DIRECT: Final[PageStatements] = page_statements(
    TEMPLATE_DIRECT, PARTS_RELATIONS, USER_SEES, WHOLE, **RELATION_VALUES
)

SQL_RECURSIVE: Final[PageStatements] = page_statements(
    TEMPLATE_RECURSIVE,
    PARTS_RELATIONS,
    USER_SEES,
    WHOLE,
    **RELATION_VALUES,
    rows_max="bigint",
    levels="int",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationFilter:
    """The relations of a request: of this type, by events of this type, not by ``ignored`` senders.

    ``recurse``: also indirect relations.
    """

    rel_type: str | None = None
    event_type: str | None = None
    ignored: list[UserId] | None = None
    recurse: bool = False


@dataclass(frozen=True, slots=True)
class RelationsPage(Page):
    """A page of events that relate to one event.

    ``recursion_depth``: the depth of indirect relations; None if these were not requested.
    """

    recursion_depth: int | None = None


async def relations(
    conn: Connection,
    event_id: EventId,
    user_id: UserId,
    relation_filter: RelationFilter,
    page_range: PageRange,
    *,
    deployment: str,
    rows_max: int,
    room_id: RoomId | None = None,
) -> RelationsPage:
    """Return exactly ``limit`` events that relate to this one, unless there are no more.

    `UnknownEvent` also where the user may not see the event, or where it is not of ``room_id``.

    Send one statement. Send one more for sync tokens of a time when a writer was behind
    (`pagination.page`), or where events were reordered since. A recursive walk reads at most
    ``rows_max`` events, nearest to the event first, and returns what it has found by then.
    `InvalidToken` where more than ``rows_max`` moves have to be read for a token.
    """
    if any("\0" in (text or "") for text in (relation_filter.rel_type, relation_filter.event_type)):
        raise InputError("a type holds no NUL")
    values: dict[str, object] = {
        "event_id": event_id,
        "in_room": room_id,
        "user_id": user_id,
        "ignored": relation_filter.ignored,
        "rel_type": relation_filter.rel_type,
        "event_type": relation_filter.event_type,
    }
    depth = RECURSION_DEPTH if relation_filter.recurse else None
    if depth is not None:
        values |= {"rows_max": rows_max, "levels": depth}
    rows, page_range = await fetch_page(
        conn,
        SQL_DIRECT if depth is None else SQL_RECURSIVE,
        page_range,
        values,
        row=PageRow,
        deployment=deployment,
        rows_max=rows_max,
    )
    if not rows:
        raise UnknownEvent(event_id)
    events = [stored_of(row.event) for row in rows if row.event is not None]
    page = await page_of(events, page_range, deployment, rows[0].reorderings)
    return RelationsPage(page.chunk, page.start, page.end, page.gaps, depth)


# --------------------------------------------------------------------------------------------------
# Aggregations of child events: the latest edit, a summary of the thread, and the references.
#
# Client-server API, "Aggregations of child events" (``m.relations``), for a whole page by one
# statement. They are as of now, for one user. Events that the user may not see, redacted events and
# events of ignored senders do not count.

AnyPage = TypeVar("AnyPage", bound=Page)

REFERENCES_MAX: Final = 1_000
"""Most references of one event, the oldest ones. `relations` pages through all."""

TEMPLATE_BUNDLES: Final[LiteralString] = """
latest AS MATERIALIZED (  -- of each thread: an event that itself relates to another begins none
    SELECT p.event_id AS root_id, p.key AS root_key, p.sender_nid AS root_sender_nid,
        last.event_nid, last.event_id, last.sender_nid,
        last.type_nid, last.whole, p.room_nid, p.principal_nid, p.ignored,
        p.joined_audiences, :user_sees.of(p)
    FROM parent p
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.sender_nid, e.type_nid, e.state_key_nid IS NULL AS whole
        FROM events e
        WHERE e.relates_to = p.key AND e.rel_type_nid = (SELECT {REL_THREAD})
            AND e.room_nid + 0 = p.room_nid
            AND NOT e.outlier
            AND {visible_by_parent}
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT 1
    ) AS last
    WHERE p.rel_type_nid IS NULL
),
-- events that may have edits or references: the requested ones, and the latest events of threads
holder AS MATERIALIZED (
    SELECT event_id, key, room_nid, sender_nid, type_nid, whole
        AND rel_type_nid IS DISTINCT FROM {REL_REPLACE} AS editable, ignored,
        joined_audiences, :user_sees.columns
    FROM parent
    UNION
    SELECT event_id, relation_key(event_id), room_nid, sender_nid, type_nid, whole, ignored,
        joined_audiences, :user_sees.columns
    FROM latest
),
found AS (
    SELECT h.event_id AS about, 'replacement' AS kind, edit.event_nid, NULL::bigint AS events,
        NULL::boolean AS participated, NULL::text[] AS ids
    FROM holder h
    CROSS JOIN LATERAL (
        SELECT e.event_nid
        FROM events e
        WHERE e.relates_to = h.key AND e.rel_type_nid = {REL_REPLACE} AND e.replaces
            AND e.room_nid + 0 = h.room_nid AND NOT e.outlier
            AND e.sender_nid = h.sender_nid AND e.type_nid = h.type_nid
            AND {visible_by_holder}
        ORDER BY e.origin_server_ts DESC, e.event_id DESC
        LIMIT 1
    ) AS edit
    WHERE h.editable
    UNION ALL
    SELECT l.root_id, 'thread', l.event_nid, thread.events, thread.participated
        OR l.root_sender_nid = l.principal_nid, NULL
    FROM latest l
    CROSS JOIN LATERAL (
        SELECT count(*) AS events, bool_or(e.sender_nid = l.principal_nid) AS participated
        FROM events e
        WHERE e.relates_to = l.root_key AND e.rel_type_nid = (SELECT {REL_THREAD})
            AND e.room_nid + 0 = l.room_nid
            AND NOT e.outlier
            AND {visible_by_thread}
    ) AS thread
    UNION ALL
    SELECT h.event_id, 'references', NULL, NULL, NULL, referring.ids
    FROM holder h
    CROSS JOIN LATERAL (
        SELECT array_agg(r.event_id ORDER BY r.topological_ordering, r.stream_ordering) AS ids
        FROM (
            SELECT e.event_id, e.topological_ordering, e.stream_ordering
            FROM events e
            WHERE e.relates_to = h.key AND e.rel_type_nid = {REL_REFERENCE}
                AND e.room_nid + 0 = h.room_nid
                AND NOT e.outlier
                AND {visible_by_holder}
            ORDER BY e.topological_ordering, e.stream_ordering
            LIMIT :references_max
        ) AS r
    ) AS referring
    WHERE referring.ids IS NOT NULL
)
"""
"""The aggregations of the CTE `parent`: the visible events that others relate to.

As in all reads of relations, ``+ 0`` keeps the room from choosing the index: that of the room would
lead through all its events.
"""

PART_BUNDLES: Final[LiteralString] = fill(
    TEMPLATE_BUNDLES,
    visible_by_parent=fill(TEMPLATE_RELATION_IS_VISIBLE, reader="p"),
    visible_by_holder=fill(TEMPLATE_RELATION_IS_VISIBLE, reader="h"),
    visible_by_thread=fill(TEMPLATE_RELATION_IS_VISIBLE, reader="l"),
)

TEMPLATE_AGGREGATIONS: Final[LiteralString] = """
WITH
{reader},
named AS MATERIALIZED (
    SELECT found.event_nid, found.room_nid, relation_key(found.event_id) AS key
    FROM (SELECT DISTINCT unnest(:event_ids) AS id) AS one
    CROSS JOIN LATERAL (
        SELECT event_nid, room_nid, event_id FROM events WHERE event_id = one.id OFFSET 0
    ) AS found
),
-- events that others relate to: a probe for each, never a join with all relations
related AS MATERIALIZED (
    SELECT n.event_nid, n.room_nid, n.key
    FROM named n
    WHERE (SELECT true FROM events c WHERE c.relates_to = n.key AND NOT c.outlier
        ORDER BY c.rel_type_nid LIMIT 1)
),
room AS MATERIALIZED (
    SELECT r.room_nid, reader.principal_nid, reader.ignored, v.*
    FROM (SELECT DISTINCT room_nid FROM related) AS r
    CROSS JOIN reader
    CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
),
parent AS MATERIALIZED (
    SELECT e.event_id, a.key, e.sender_nid, e.type_nid, e.state_key_nid IS NULL
        AND form.whole AS whole,
        CASE WHEN form.whole THEN e.rel_type_nid END AS rel_type_nid, room.*
    FROM related a
    JOIN room USING (room_nid)
    JOIN events e USING (event_nid)
    CROSS JOIN LATERAL (
        SELECT e.redacted_by IS NULL
            AND :whole.of(room) AS whole
    ) AS form
    WHERE user_sees(e, :user_sees.of(room))
),
{bundles}
SELECT t.about, t.kind, t.events, t.participated, t.ids, s.*
FROM found t
LEFT JOIN stored_events s USING (event_nid)
"""

SQL_AGGREGATIONS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_AGGREGATIONS,
        reader=PART_READER,
        bundles=PART_BUNDLES,
    ),
    USER_SEES,
    WHOLE,
    user_id="text",
    event_ids="text[]",
    ignored="text[]",
    references_max="bigint",
).sql


class AggregationRow(NamedTuple):
    """One aggregation of the event ``about``: `kind` says which columns it has.

    "replacement": the edit. "thread": its latest event and the counts. "references": the ids.
    """

    about: str
    kind: str
    events: int | None
    participated: bool | None
    ids: list[str] | None
    event: StoredEventRow | None


async def aggregations(
    conn: Connection,
    user_id: UserId,
    event_ids: Collection[EventId],
    *,
    ignored: list[UserId] | None = None,
) -> dict[EventId, Aggregations]:
    """Return the aggregations of these events, by id.

    Events without any, and events that the user may not see, are left out.
    """
    rows = await conn.fetch(
        SQL_AGGREGATIONS,
        user_id,
        list(event_ids),
        ignored,
        REFERENCES_MAX,
        row=AggregationRow,
    )
    by_id = combined(rows)
    requested = set(event_ids)
    return {
        event_id: aggregation for event_id, aggregation in by_id.items() if event_id in requested
    }


def combined(rows: Iterable[AggregationRow]) -> dict[EventId, Aggregations]:
    """Return the aggregations in rows, by id: also those of the latest events of threads."""
    by_id: dict[EventId, Aggregations] = {}
    # threads last: their latest events have aggregations, too
    for row in sorted(rows, key=lambda row: row.kind == "thread"):
        about = EventId(row.about)
        current = by_id.get(about, Aggregations())
        if row.event is None:
            by_id[about] = replace(current, references=tuple(map(EventId, row.ids or ())))
        elif row.kind == "replacement":
            by_id[about] = replace(current, replacement=stored_of(row.event))
        else:
            latest = stored_of(row.event)
            latest = replace(latest, relations=by_id.get(latest.event_id))
            by_id[about] = replace(
                current,
                thread=ThreadSummary(latest, row.events or 0, participated=bool(row.participated)),
            )
    return by_id


async def of_page(
    conn: Connection, user_id: UserId, page: AnyPage, *, ignored: list[UserId] | None = None
) -> AnyPage:
    """Return the page with the `StoredEvent.relations` of its events."""
    aggregated = await aggregations(conn, user_id, _ids(page.chunk), ignored=ignored)
    return replace(page, chunk=_with(page.chunk, aggregated))


async def of_context(
    conn: Connection, user_id: UserId, context: Context, *, ignored: list[UserId] | None = None
) -> Context:
    """Return the context with the relations of its events, but not of its state."""
    events = [*context.events_before, context.event, *context.events_after]
    aggregated = await aggregations(conn, user_id, _ids(events), ignored=ignored)
    [event] = _with([context.event], aggregated)
    return replace(
        context,
        event=event,
        events_before=_with(context.events_before, aggregated),
        events_after=_with(context.events_after, aggregated),
    )


def _ids(events: Sequence[StoredEvent]) -> list[EventId]:
    return [event.event_id for event in events]


def _with(
    events: Sequence[StoredEvent], aggregated: Mapping[EventId, Aggregations]
) -> list[StoredEvent]:
    return [
        replace(event, relations=aggregated[event.event_id])
        if event.event_id in aggregated
        else event
        for event in events
    ]
