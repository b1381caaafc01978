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
    TEMPLATE_EVENT,
    Aggregations,
    StoredEvent,
    StoredEventRow,
    ThreadSummary,
    stored_of,
)
from storage.queries.filters import TEMPLATE_IGNORED, TEMPLATE_RELATION_IS_VISIBLE
from storage.queries.pagination.page import (
    PART_LEFT_OUT,
    PART_NONE_LEFT_OUT,
    PART_NOT_LEFT_OUT,
    PART_OR_BROUGHT,
    REORDERED_VALUES,
    TEMPLATE_NOT_LEFT_OUT_LIVE,
    TEMPLATE_REORDERED,
    Direction,
    Page,
    PageRange,
    exact,
    fetch_page,
    page_of,
)
from storage.queries.pagination.reordering import (
    Reorderings,
    lower_bound,
    lower_end,
    numbers,
    passed_positions,
    upper_end,
)

RECURSION_DEPTH: Final = 3
"""Depth of a recursive request. The specification recommends at least three."""

TEMPLATE_DIRECT: Final[LiteralString] = """
WITH RECURSIVE
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = :user_id),
        0) AS principal_nid,
        {ignored} AS ignored
),
target AS MATERIALIZED (
    SELECT relation_key(e.event_id) AS key, e.room_nid, r.room_id, r.room_version, r.moves,
        reader.ignored, v.*
    FROM reader
    CROSS JOIN events e
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS v
    WHERE e.event_id = :event_id {and_not_reordered}
        AND ({in_room} IS NULL OR r.room_id = {in_room})
        AND user_sees(e, :user_sees.of(v))
),
found AS (  -- the types of relations to it: the index leads from each to the next one
    SELECT (
        SELECT e.rel_type_nid FROM events e WHERE e.relates_to = r.key AND NOT e.outlier
            ORDER BY e.rel_type_nid LIMIT 1
    ) AS rel_type_nid, r.key
    FROM target r
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
kind AS MATERIALIZED (
    SELECT rel_type_nid FROM found WHERE rel_type_nid IS NOT NULL
    UNION ALL
    SELECT type_nid FROM event_types WHERE type = :rel_type
),
{reordered}
page AS MATERIALIZED (  -- of each type the limit and one more, which shows that there are more
    SELECT e.*
    FROM target r
    CROSS JOIN kind
    {page_range}
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering,
            e.depth, e.redacted_by, e.rejected, e.soft_failed, e.outlier, e.redacted_form,
            e.encoding, e.json
        FROM events e
        WHERE e.relates_to = r.key AND e.rel_type_nid = kind.rel_type_nid
            AND e.room_nid + 0 = r.room_nid AND NOT e.outlier  -- + 0: see aggregations.py
            AND (e.topological_ordering, e.stream_ordering) <= {upper}
            AND {above_lower}
            AND (e.backfilled OR e.stream_ordering <= :upper_live)
            AND (
                (e.topological_ordering, e.stream_ordering) > (:lower, :lower_stream)
                    {and_not_left_out}
                OR (
                    NOT e.backfilled AND e.stream_ordering > :lower_live
                        AND (e.topological_ordering, e.stream_ordering) > (:above, :above_stream)
                        {and_not_left_out_live}
                )
            )
            AND (:event_type IS NULL
                OR e.type_nid = (SELECT type_nid FROM event_types WHERE type = :event_type))
            AND {is_visible}
        ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
        LIMIT :page_max + 1
    ) AS e
    ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT :page_max + 1
)
SELECT r.moves, {left_out},
    {event}
FROM target r
LEFT JOIN page ON true
ORDER BY page.topological_ordering {order}, page.stream_ordering {order}
"""
"""The parameters are those of a page (messages.py). `:room_id`: the room of the event, or NULL."""

TEMPLATE_PAGE_RANGE: Final[LiteralString] = """
{reordered}
page_range AS MATERIALIZED (  -- each brought event is a range of its own
    SELECT CASE WHEN :lower_live = 9223372036854775807 THEN :lower
        ELSE :above END AS lower, 0::bigint AS lower_stream,
        :upper AS upper, :upper_stream AS upper_stream
    UNION ALL
    SELECT topological_ordering, stream_ordering, topological_ordering, stream_ordering FROM brought
),
"""

TEMPLATE_RECURSIVE: Final[LiteralString] = """
WITH RECURSIVE
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = :user_id),
        0) AS principal_nid,
        {ignored} AS ignored,
        (SELECT type_nid FROM event_types WHERE type = :rel_type) AS rel_type_nid,
        (SELECT type_nid FROM event_types WHERE type = :event_type) AS type_nid
),
target AS MATERIALIZED (
    SELECT e.event_nid, relation_key(e.event_id) AS key, e.room_nid, r.moves, reader.ignored,
        reader.rel_type_nid, reader.type_nid, v.*
    FROM reader
    CROSS JOIN events e
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS v
    WHERE e.event_id = :event_id {and_not_reordered}
        AND ({in_room} IS NULL OR r.room_id = {in_room})
        AND user_sees(e, :user_sees.of(v))
),
-- level by level, not through hidden events. An event relates to one other event: the only cycles
-- are those by the target
walk AS (
    SELECT r.event_nid, r.key, 0 AS level, true AS shown
    FROM target r
    UNION ALL
    SELECT e.event_nid, e.key, w.level + 1, e.shown
    FROM walk w
    CROSS JOIN target r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, relation_key(e.event_id) AS key, ({is_visible}) AS shown
        FROM events e
        WHERE e.relates_to = w.key AND e.room_nid + 0 = r.room_nid AND NOT e.outlier
            AND e.event_nid <> r.event_nid
            AND (:rel_type IS NULL OR e.rel_type_nid = r.rel_type_nid)
            AND (:event_type IS NULL OR e.type_nid = r.type_nid)
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
    SELECT e.event_nid, e.topological_ordering, e.stream_ordering
    FROM found f
    JOIN events e USING (event_nid)
    WHERE f.shown AND f.level > 0
        AND ((e.topological_ordering, e.stream_ordering) <= (:upper, :upper_stream) {or_brought})
        AND (e.backfilled OR e.stream_ordering <= :upper_live)
        AND (
            (e.topological_ordering, e.stream_ordering) > (:lower, :lower_stream)
                {and_not_left_out}
            OR (
                NOT e.backfilled AND e.stream_ordering > :lower_live
                    AND (e.topological_ordering, e.stream_ordering) > (:above, :above_stream)
                    {and_not_left_out_live}
            )
        )
    ORDER BY e.topological_ordering * :sign, e.stream_ordering * :sign
    LIMIT :page_max + 1
)
SELECT r.moves, {left_out}, s.*
FROM target r
LEFT JOIN page ON true
LEFT JOIN stored_events s ON s.event_nid = page.event_nid
ORDER BY page.topological_ordering * :sign, page.stream_ordering * :sign
"""
"""`:sign` is -1 for a page backwards, else 1. `:rows_max`: of the walk. `:levels`: `LEVELS`."""

PART_IS_VISIBLE: Final[LiteralString] = fill(TEMPLATE_RELATION_IS_VISIBLE, reader="r")

PART_EVENT: Final[LiteralString] = fill(TEMPLATE_EVENT, event="page", room="r")

PART_IGNORED: Final[LiteralString] = fill(TEMPLATE_IGNORED, reader=":user_id", named=":ignored")

PARTS_ORDINARY: Final[dict[str, LiteralString]] = {
    "and_not_reordered": "AND r.moves <= :moves",
    "in_room": ":room_id",
    "reordered": "",
    "page_range": "",
    "upper": "(:upper, :upper_stream)",
    "above_lower": """
            e.topological_ordering >= CASE
                WHEN :lower_live = 9223372036854775807 THEN :lower ELSE :above END
    """,
    "and_not_left_out": "",
    "and_not_left_out_live": "",
    "left_out": PART_NONE_LEFT_OUT,
}

PARTS_REORDERED: Final[dict[str, LiteralString]] = {
    "and_not_reordered": "",
    "in_room": ":room_id",
    "page_range": "CROSS JOIN page_range AS p",
    "upper": "(p.upper, p.upper_stream)",
    "above_lower": "(e.topological_ordering, e.stream_ordering) >= (p.lower, p.lower_stream)",
    "and_not_left_out": PART_NOT_LEFT_OUT,
    "and_not_left_out_live": fill(TEMPLATE_NOT_LEFT_OUT_LIVE, behind=":behind"),
}

PARTS_NUMBERS: Final[dict[str, LiteralString]] = {
    "room": "target",
    "upper": ":upper_numbers",
    "lower": ":lower_numbers",
    "rows_max": ":moves_max",
}

PAGE_VALUES: Final[dict[str, str]] = {
    "event_id": "text",
    "user_id": "text",
    "ignored": "text[]",
    "rel_type": "text",
    "event_type": "text",
    "upper": "bigint",
    "upper_stream": "bigint",
    "upper_live": "bigint",
    "lower": "bigint",
    "lower_stream": "bigint",
    "lower_live": "bigint",
    "page_max": "bigint",
}
"""The first parameters of a page."""

SQL_BACKWARDS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_DIRECT,
        event=PART_EVENT,
        order="DESC",
        is_visible=PART_IS_VISIBLE,
        ignored=PART_IGNORED,
        **PARTS_ORDINARY,
    ),
    USER_SEES,
    WHOLE,
    **PAGE_VALUES,
    above="bigint",
    above_stream="bigint",
    moves="bigint",
    room_id="text",
).sql

SQL_FORWARDS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_DIRECT,
        event=PART_EVENT,
        order="ASC",
        is_visible=PART_IS_VISIBLE,
        ignored=PART_IGNORED,
        **PARTS_ORDINARY,
    ),
    USER_SEES,
    WHOLE,
    **PAGE_VALUES,
    above="bigint",
    above_stream="bigint",
    moves="bigint",
    room_id="text",
).sql

SQL_BACKWARDS_REORDERED: Final[LiteralString] = compose(
    fill(
        TEMPLATE_DIRECT,
        event=PART_EVENT,
        order="DESC",
        is_visible=PART_IS_VISIBLE,
        ignored=PART_IGNORED,
        left_out=PART_NONE_LEFT_OUT,
        reordered=fill(
            TEMPLATE_PAGE_RANGE,
            reordered=fill(TEMPLATE_REORDERED, forwards="false", **PARTS_NUMBERS),
        ),
        **PARTS_REORDERED,
    ),
    USER_SEES,
    WHOLE,
    **PAGE_VALUES,
    above="bigint",
    above_stream="bigint",
    **REORDERED_VALUES,
    room_id="text",
).sql

SQL_FORWARDS_REORDERED: Final[LiteralString] = compose(
    fill(
        TEMPLATE_DIRECT,
        event=PART_EVENT,
        order="ASC",
        is_visible=PART_IS_VISIBLE,
        ignored=PART_IGNORED,
        left_out=PART_LEFT_OUT,
        reordered=fill(
            TEMPLATE_PAGE_RANGE,
            reordered=fill(TEMPLATE_REORDERED, forwards="true", **PARTS_NUMBERS),
        ),
        **PARTS_REORDERED,
    ),
    USER_SEES,
    WHOLE,
    **PAGE_VALUES,
    above="bigint",
    above_stream="bigint",
    **REORDERED_VALUES,
    room_id="text",
).sql

SQL_RECURSIVE: Final[LiteralString] = compose(
    fill(
        TEMPLATE_RECURSIVE,
        is_visible=PART_IS_VISIBLE,
        ignored=PART_IGNORED,
        and_not_reordered="AND r.moves <= :moves",
        in_room=":room_id",
        reordered="",
        or_brought="",
        and_not_left_out="",
        and_not_left_out_live="",
        left_out=PART_NONE_LEFT_OUT,
    ),
    USER_SEES,
    WHOLE,
    **PAGE_VALUES,
    sign="bigint",
    rows_max="bigint",
    levels="int",
    above="bigint",
    above_stream="bigint",
    moves="bigint",
    room_id="text",
).sql

SQL_RECURSIVE_REORDERED: Final[LiteralString] = compose(
    fill(
        TEMPLATE_RECURSIVE,
        is_visible=PART_IS_VISIBLE,
        ignored=PART_IGNORED,
        and_not_reordered="",
        in_room=":room_id",
        reordered=fill(
            TEMPLATE_REORDERED,
            room="target",
            upper=":upper_numbers",
            lower=":lower_numbers",
            rows_max=":moves_max",
            forwards=":sign > 0",
        ),
        or_brought=PART_OR_BROUGHT,
        and_not_left_out=PART_NOT_LEFT_OUT,
        and_not_left_out_live=fill(TEMPLATE_NOT_LEFT_OUT_LIVE, behind=":behind"),
        left_out=PART_LEFT_OUT,
    ),
    USER_SEES,
    WHOLE,
    **PAGE_VALUES,
    sign="bigint",
    rows_max="bigint",
    levels="int",
    above="bigint",
    above_stream="bigint",
    **REORDERED_VALUES,
    room_id="text",
).sql


class RelatedRow(NamedTuple):
    """One event of the page; None if the page has none; with the moves."""

    moves: int
    left_out_topological: list[int] | None
    left_out_levels: list[int] | None
    event: StoredEventRow | None


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
    (`pagination.sync_tokens`), or where events were reordered since. A recursive walk reads at most
    ``rows_max`` events, nearest to the event first, and returns what it has found by then.
    `InvalidToken` where more than ``rows_max`` moves have to be read for a token.
    """
    if any("\0" in (text or "") for text in (relation_filter.rel_type, relation_filter.event_type)):
        raise InputError("a type holds no NUL")
    requested_range, page_range = page_range, await exact(conn, page_range, event_id=event_id)
    upper, lower = page_range.upper, page_range.lower
    ordinary, reordered = _statements(page_range.direction, recurse=relation_filter.recurse)
    sign = -1 if page_range.direction == "b" else 1
    arguments: tuple[object, ...] = (
        *(
            event_id,
            user_id,
            relation_filter.ignored,
            relation_filter.rel_type,
            relation_filter.event_type,
        ),
        *(*upper_end(upper), *lower_end(lower), page_range.limit),
        *((sign, rows_max, RECURSION_DEPTH) if relation_filter.recurse else ()),
        *lower_bound(lower),
    )
    reordering = numbers(upper), numbers(lower), rows_max, passed_positions(lower)
    rows = await fetch_page(
        page_range,
        deployment,
        lambda reorder_count: conn.fetch(
            ordinary, *arguments, reorder_count, room_id, row=RelatedRow
        ),
        lambda: conn.fetch(reordered, *arguments, *reordering, room_id, row=RelatedRow),
        skip_ordinary=page_range is not requested_range,
    )
    if not rows:
        raise UnknownEvent(event_id)
    events = [stored_of(row.event) for row in rows if row.event is not None]
    first = rows[0]
    reorderings = Reorderings.of(first.moves, first.left_out_topological, first.left_out_levels)
    page = await page_of(events, page_range, deployment, reorderings)
    depth = RECURSION_DEPTH if relation_filter.recurse else None
    return RelationsPage(page.chunk, page.start, page.end, page.gaps, depth)


def _statements(direction: Direction, *, recurse: bool) -> tuple[LiteralString, LiteralString]:
    """Return the ordinary statement, and the one for reordered events."""
    if recurse:
        return SQL_RECURSIVE, SQL_RECURSIVE_REORDERED
    if direction == "b":
        return SQL_BACKWARDS, SQL_BACKWARDS_REORDERED
    return SQL_FORWARDS, SQL_FORWARDS_REORDERED


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
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = :user_id),
        0) AS principal_nid,
        {ignored} AS ignored
),
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
        bundles=PART_BUNDLES,
        ignored=fill(TEMPLATE_IGNORED, reader=":user_id", named=":ignored"),
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
