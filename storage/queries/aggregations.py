"""Aggregations of child events: the latest edit, a summary of the thread, and the references.

Client-server API, "Aggregations of child events" (``m.relations``), for a whole page by one
statement. They are as of now, for one user. Events that the user may not see, redacted events and
events of ignored senders do not count.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, LiteralString, NamedTuple, TypeVar

from storage.codec import StoredBytes
from storage.database.connection import Connection
from storage.database.sql_template import fill
from storage.ids import EventId, UserId
from storage.queries.context import Context
from storage.queries.events import Aggregations, StoredEvent, ThreadSummary, stored_of
from storage.queries.filters import TEMPLATE_IGNORED
from storage.queries.pagination.page import Page
from storage.queries.relation_visibility import TEMPLATE_RELATION_IS_VISIBLE

AnyPage = TypeVar("AnyPage", bound=Page)

REFERENCES_MAX: Final = 1_000
"""Most references of one event, the oldest ones. `relations` pages through all."""

TEMPLATE_BUNDLES: Final[LiteralString] = """
latest AS MATERIALIZED (  -- of each thread: an event that itself relates to another begins none
    SELECT p.event_id AS root_id, p.key AS root_key, p.sender_nid AS root_sender_nid,
        last.event_nid, last.event_id, last.sender_nid,
        last.type_nid, last.whole, p.room_nid, p.principal_nid, p.ignored, p.own_audiences,
            p.shared_audiences, p.world_audiences,
        p.shared_before, p.joined_audiences, p.joined_since, p.reader_nid, p.unread
    FROM parent p
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.sender_nid, e.type_nid, e.state_key_nid IS NULL AS whole
        FROM events e
        WHERE e.relates_to = p.key AND e.rel_type_nid = (SELECT 22)
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
        AND rel_type_nid IS DISTINCT FROM 19 AS editable, ignored,
        own_audiences, shared_audiences, world_audiences, shared_before, joined_audiences,
            joined_since, reader_nid, unread
    FROM parent
    UNION
    SELECT event_id, relation_key(event_id), room_nid, sender_nid, type_nid, whole, ignored,
        own_audiences, shared_audiences, world_audiences, shared_before, joined_audiences,
            joined_since, reader_nid, unread
    FROM latest
),
found AS (
    SELECT h.event_id AS about, 'replacement' AS kind, edit.event_nid, NULL::bigint AS events,
        NULL::boolean AS participated, NULL::text[] AS ids
    FROM holder h
    CROSS JOIN LATERAL (
        SELECT e.event_nid
        FROM events e
        WHERE e.relates_to = h.key AND e.rel_type_nid = 19 AND e.replaces
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
        WHERE e.relates_to = l.root_key AND e.rel_type_nid = (SELECT 22)
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
            WHERE e.relates_to = h.key AND e.rel_type_nid = 21 AND e.room_nid + 0 = h.room_nid
                AND NOT e.outlier
                AND {visible_by_holder}
            ORDER BY e.topological_ordering, e.stream_ordering
            LIMIT $4::bigint
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
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid,
        {ignored} AS ignored
),
named AS MATERIALIZED (
    SELECT found.event_nid, found.room_nid, relation_key(found.event_id) AS key
    FROM (SELECT DISTINCT unnest($2::text[]) AS id) AS one
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
            AND (was_there(e, room.joined_since, room.joined_audiences)
                OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                OR was_there_before(e, room.reader_nid, room.unread)) AS whole
    ) AS form
    WHERE user_sees(e, room.joined_since, room.own_audiences, room.shared_audiences,
        room.world_audiences,
        room.shared_before, room.reader_nid, room.unread)
),
{bundles}
SELECT t.about, t.kind, t.events, t.participated, t.ids, s.*
FROM found t
LEFT JOIN stored_events s USING (event_nid)
"""

SQL_AGGREGATIONS: Final[LiteralString] = fill(
    TEMPLATE_AGGREGATIONS,
    bundles=PART_BUNDLES,
    ignored=fill(TEMPLATE_IGNORED, reader="$1", named="$3"),
)


class AggregationRow(NamedTuple):
    """One aggregation of the event ``about``: `kind` says which columns it has.

    "replacement": the edit. "thread": its latest event and the counts. "references": the ids.
    """

    about: str
    kind: str
    events: int | None
    participated: bool | None
    ids: list[str] | None
    event_nid: int | None
    event_id: str | None
    room_id: str | None
    room_version: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    depth: int | None
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool | None
    outlier: bool | None
    redacted_form: bool | None
    encoding: int | None
    json: StoredBytes | None


EVENT: Final = AggregationRow._fields.index("event_nid")
"""The first column of the event."""


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
    found = combined(rows)
    requested = set(event_ids)
    return {event_id: one for event_id, one in found.items() if event_id in requested}


def combined(rows: Iterable[AggregationRow]) -> dict[EventId, Aggregations]:
    """Return the aggregations in rows, by id: also those of the latest events of threads."""
    found: dict[EventId, Aggregations] = {}
    # threads last: their latest events have aggregations, too
    for row in sorted(rows, key=lambda row: row.kind == "thread"):
        about = EventId(row.about)
        known = found.get(about, Aggregations())
        if row.kind == "replacement":
            found[about] = replace(known, replacement=stored_of(row[EVENT:]))
        elif row.kind == "references":
            found[about] = replace(known, references=tuple(EventId(one) for one in row.ids or ()))
        else:
            latest = stored_of(row[EVENT:])
            latest = replace(latest, relations=found.get(latest.event_id))
            found[about] = replace(
                known,
                thread=ThreadSummary(latest, row.events or 0, participated=bool(row.participated)),
            )
    return found


async def of_page(
    conn: Connection, user_id: UserId, page: AnyPage, *, ignored: list[UserId] | None = None
) -> AnyPage:
    """Return the page with the `StoredEvent.relations` of its events."""
    found = await aggregations(conn, user_id, _ids(page.chunk), ignored=ignored)
    return replace(page, chunk=_with(page.chunk, found))


async def of_context(
    conn: Connection, user_id: UserId, context: Context, *, ignored: list[UserId] | None = None
) -> Context:
    """Return the context with the relations of its events, but not of its state."""
    events = [*context.events_before, context.event, *context.events_after]
    found = await aggregations(conn, user_id, _ids(events), ignored=ignored)
    [event] = _with([context.event], found)
    return replace(
        context,
        event=event,
        events_before=_with(context.events_before, found),
        events_after=_with(context.events_after, found),
    )


def _ids(events: Sequence[StoredEvent]) -> list[EventId]:
    return [event.event_id for event in events]


def _with(
    events: Sequence[StoredEvent], found: Mapping[EventId, Aggregations]
) -> list[StoredEvent]:
    return [
        replace(event, relations=found[event.event_id]) if event.event_id in found else event
        for event in events
    ]
