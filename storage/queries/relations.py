"""What relates to an event: edits, reactions, references, threads, in the order and with the tokens of `messages`. One statement, two after a move.

Client-server API, "Event relationships". An event relates to another one as long as it does in the eyes of who asks: it is not
redacted (nor shown redacted, for its sender was erased), of the same room, and they may see it. With `recurse` what relates to
those is looked up as well, as if one asked again for each of them with the same filters, down to `LEVELS`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import InputError, UnknownEvent
from storage.ids import EventId, UserId
from storage.queries.events import StoredEvent, stored_of
from storage.queries.messages import Direction, Page, PageRange, exact, page_of, with_care
from storage.queries.pagination.relations_reordered import (
    SQL_BACKWARDS_MOVED,
    SQL_FORWARDS_MOVED,
    SQL_RECURSIVE_MOVED,
)
from storage.queries.pagination.reordering import (
    Reorderings,
    above,
    behind,
    lower_end,
    numbers,
    upper_end,
)

LEVELS: Final = 3
"""How many steps from the event a recursive answer goes; the specification recommends at least three."""

SQL_BACKWARDS: Final[LiteralString] = """
WITH RECURSIVE
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY($3::text[])) AS ignored
),
target AS MATERIALIZED (
    SELECT relation_key(e.event_id) AS key, e.room_nid, r.room_id, r.room_version, r.moves,
        reader.ignored, sight.*
    FROM reader
    CROSS JOIN events e
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS sight
    -- else the tokens are to be read with care (pagination/relations_reordered.py)
    WHERE e.event_id = $1::text AND r.moves <= $13::bigint
        AND user_sees(e, sight.joined_since, sight.own_audiences, sight.shared_audiences,
            sight.world_audiences,
            sight.shared_before, sight.reader_nid, sight.unread)
),
found AS (  -- the types of relations to it, from one to the next by the index
    SELECT (
        SELECT e.rel_type_nid FROM events e WHERE e.relates_to = t.key AND NOT e.outlier
            ORDER BY e.rel_type_nid LIMIT 1
    ) AS rel_type_nid, t.key
    FROM target t
    WHERE $4::text IS NULL
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
    SELECT type_nid FROM event_types WHERE type = $4::text
),
page AS MATERIALIZED (  -- of each type as many as asked for, and one more
    SELECT e.*
    FROM target t
    CROSS JOIN kind
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth,
            e.redacted_by, e.rejected, e.soft_failed,
            e.outlier, e.redacted_form, e.encoding, e.json
        FROM events e
        WHERE e.relates_to = t.key AND e.rel_type_nid = kind.rel_type_nid
            AND e.room_nid = t.room_nid AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= ($6::bigint, $7::bigint)
            -- beside a timeline all
            AND e.topological_ordering >= CASE
                WHEN $11::bigint = 9223372036854775807 THEN $9::bigint ELSE $14::bigint END
            AND (e.backfilled OR e.stream_ordering <= $8::bigint)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($9::bigint, $10::bigint)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $11::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($14::bigint, $15::bigint)
                )
            )
            AND ($5::text IS NULL
                OR e.type_nid = (SELECT type_nid FROM event_types WHERE type = $5::text))
            AND user_sees_relation(e, t.joined_since, t.own_audiences, t.shared_audiences,
                t.world_audiences,
                t.shared_before, t.reader_nid, t.unread, t.ignored)
            AND (was_there(e, t.joined_since, t.joined_audiences)
                OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                OR was_there_before(e, t.reader_nid, t.unread))
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $12::bigint + 1
    ) AS e
    ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $12::bigint + 1
)
SELECT CASE WHEN t.moves > 0 THEN ARRAY[t.moves] END AS moved,
    page.event_nid, page.event_id, t.room_id, t.room_version, page.stream_ordering,
        page.topological_ordering, page.depth,
    (SELECT b.event_id FROM events b WHERE b.event_nid = page.redacted_by) AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding, page.json
FROM target t
LEFT JOIN page ON true
ORDER BY page.topological_ordering DESC, page.stream_ordering DESC
"""

SQL_FORWARDS: Final[LiteralString] = """
WITH RECURSIVE
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY($3::text[])) AS ignored
),
target AS MATERIALIZED (
    SELECT relation_key(e.event_id) AS key, e.room_nid, r.room_id, r.room_version, r.moves,
        reader.ignored, sight.*
    FROM reader
    CROSS JOIN events e
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS sight
    -- else the tokens are to be read with care (pagination/relations_reordered.py)
    WHERE e.event_id = $1::text AND r.moves <= $13::bigint
        AND user_sees(e, sight.joined_since, sight.own_audiences, sight.shared_audiences,
            sight.world_audiences,
            sight.shared_before, sight.reader_nid, sight.unread)
),
found AS (  -- the types of relations to it, from one to the next by the index
    SELECT (
        SELECT e.rel_type_nid FROM events e WHERE e.relates_to = t.key AND NOT e.outlier
            ORDER BY e.rel_type_nid LIMIT 1
    ) AS rel_type_nid, t.key
    FROM target t
    WHERE $4::text IS NULL
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
    SELECT type_nid FROM event_types WHERE type = $4::text
),
page AS MATERIALIZED (  -- of each type as many as asked for, and one more
    SELECT e.*
    FROM target t
    CROSS JOIN kind
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth,
            e.redacted_by, e.rejected, e.soft_failed,
            e.outlier, e.redacted_form, e.encoding, e.json
        FROM events e
        WHERE e.relates_to = t.key AND e.rel_type_nid = kind.rel_type_nid
            AND e.room_nid = t.room_nid AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= ($6::bigint, $7::bigint)
            -- beside a timeline all
            AND e.topological_ordering >= CASE
                WHEN $11::bigint = 9223372036854775807 THEN $9::bigint ELSE $14::bigint END
            AND (e.backfilled OR e.stream_ordering <= $8::bigint)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($9::bigint, $10::bigint)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $11::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($14::bigint, $15::bigint)
                )
            )
            AND ($5::text IS NULL
                OR e.type_nid = (SELECT type_nid FROM event_types WHERE type = $5::text))
            AND user_sees_relation(e, t.joined_since, t.own_audiences, t.shared_audiences,
                t.world_audiences,
                t.shared_before, t.reader_nid, t.unread, t.ignored)
            AND (was_there(e, t.joined_since, t.joined_audiences)
                OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                OR was_there_before(e, t.reader_nid, t.unread))
        ORDER BY e.topological_ordering, e.stream_ordering
        LIMIT $12::bigint + 1
    ) AS e
    ORDER BY e.topological_ordering, e.stream_ordering
    LIMIT $12::bigint + 1
)
SELECT CASE WHEN t.moves > 0 THEN ARRAY[t.moves] END AS moved,
    page.event_nid, page.event_id, t.room_id, t.room_version, page.stream_ordering,
        page.topological_ordering, page.depth,
    (SELECT b.event_id FROM events b WHERE b.event_nid = page.redacted_by) AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding, page.json
FROM target t
LEFT JOIN page ON true
ORDER BY page.topological_ordering, page.stream_ordering
"""

SQL_RECURSIVE: Final[LiteralString] = """
WITH RECURSIVE
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY($3::text[])) AS ignored,
        (SELECT type_nid FROM event_types WHERE type = $4::text) AS rel_type_nid,
        (SELECT type_nid FROM event_types WHERE type = $5::text) AS type_nid
),
target AS MATERIALIZED (
    SELECT e.event_nid, relation_key(e.event_id) AS key, e.room_nid, r.moves, reader.ignored,
        reader.rel_type_nid, reader.type_nid, sight.*
    FROM reader
    CROSS JOIN events e
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS sight
    -- else the tokens are to be read with care (pagination/relations_reordered.py)
    WHERE e.event_id = $1::text AND r.moves <= $16::bigint
        AND user_sees(e, sight.joined_since, sight.own_audiences, sight.shared_audiences,
            sight.world_audiences,
            sight.shared_before, sight.reader_nid, sight.unread)
),
-- level by level; what is not shown is not gone through. Each event relates to one other, so there
-- are no circles but by the target
walk AS (
    SELECT t.event_nid, t.key, 0 AS level, true AS shown
    FROM target t
    UNION ALL
    SELECT e.event_nid, relation_key(e.event_id), w.level + 1,
        user_sees_relation(e, t.joined_since, t.own_audiences, t.shared_audiences,
            t.world_audiences,
            t.shared_before, t.reader_nid, t.unread, t.ignored)
        AND (was_there(e, t.joined_since, t.joined_audiences)
            OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
            OR was_there_before(e, t.reader_nid, t.unread))
    FROM walk w
    CROSS JOIN target t
    JOIN events e ON e.relates_to = w.key AND e.room_nid = t.room_nid AND NOT e.outlier
    WHERE w.shown AND w.level < $15::int AND e.event_nid <> t.event_nid
        AND ($4::text IS NULL OR e.rel_type_nid = t.rel_type_nid)
        AND ($5::text IS NULL OR e.type_nid = t.type_nid)
),
found AS (  -- stops the walk when it has read that many rows
    SELECT event_nid, level, shown
    FROM walk
    LIMIT $14::bigint
),
page AS MATERIALIZED (
    SELECT e.event_nid, e.topological_ordering, e.stream_ordering
    FROM found f
    JOIN events e USING (event_nid)
    WHERE f.shown AND f.level > 0
        AND (e.topological_ordering, e.stream_ordering) <= ($6::bigint, $7::bigint)
        AND (e.backfilled OR e.stream_ordering <= $8::bigint)
        AND (
            (e.topological_ordering, e.stream_ordering) > ($9::bigint, $10::bigint)
            OR (
                NOT e.backfilled AND e.stream_ordering > $11::bigint
                    AND (e.topological_ordering, e.stream_ordering) > ($17::bigint, $18::bigint)
            )
        )
    ORDER BY e.topological_ordering * $13::bigint, e.stream_ordering * $13::bigint
    LIMIT $12::bigint + 1
)
SELECT CASE WHEN t.moves > 0 THEN ARRAY[t.moves] END AS moved, s.*
FROM target t
LEFT JOIN page ON true
LEFT JOIN stored_events s ON s.event_nid = page.event_nid
ORDER BY page.topological_ordering * $13::bigint, page.stream_ordering * $13::bigint
"""


class RelatedRow(NamedTuple):
    """One event of the page, or all None if it has none; with what has moved."""

    moved: list[int] | None
    """For `Reorderings.of`."""
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
    json: bytes | None


EVENT: Final = RelatedRow._fields.index("event_nid")
"""Where the columns of the event begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationFilter:
    """Which relations are asked for: of a type, by events of a type, by others than these senders, also indirect ones."""

    rel_type: str | None = None
    event_type: str | None = None
    ignored: Collection[UserId] = ()
    recurse: bool = False


@dataclass(frozen=True, slots=True)
class RelationsPage(Page):
    """A page of events that relate to one.

    ``recursion_depth``: how far it was looked for indirect ones; None if they were not asked for.
    """

    recursion_depth: int | None = None


async def relations(
    conn: Connection,
    event_id: EventId,
    user_id: UserId,
    wanted: RelationFilter,
    asked: PageRange,
    *,
    deployment: str,
    rows_max: int,
) -> RelationsPage:
    """Exactly ``limit`` events that relate to one, unless there are no more.

    `UnknownEvent` also where the user may not see the event.

    One statement; one more for tokens of sync of a time when a writer was behind
    (`messages.exact`), or where events have moved since. A recursive walk reads ``rows_max`` events
    at most, nearest to the event first; what it has found by then is all there is. `InvalidToken`
    where more than ``rows_max`` moves are to be read for a token.
    """
    if any("\0" in (text or "") for text in (wanted.rel_type, wanted.event_type)):
        raise InputError("a type holds no NUL")
    given, asked = asked, await exact(conn, asked, event_id=event_id)
    upper, lower = (
        (asked.start, asked.stop) if asked.direction == "b" else (asked.stop, asked.start)
    )
    bounds = upper_end(upper) + lower_end(lower)
    arguments: tuple[object, ...] = (
        event_id,
        user_id,
        list(wanted.ignored),
        wanted.rel_type,
        wanted.event_type,
        *bounds,
        asked.limit,
    )
    if wanted.recurse:
        arguments += (-1 if asked.direction == "b" else 1, rows_max, LEVELS)
    ordinary, moved = _statements(asked.direction, recurse=wanted.recurse)
    rows = await with_care(
        asked,
        deployment,
        asked is not given,
        lambda moves: conn.fetch(ordinary, *arguments, moves, *above(lower), row=RelatedRow),
        lambda: conn.fetch(
            moved,
            *arguments,
            numbers(upper),
            numbers(lower),
            rows_max,
            *above(lower),
            behind(lower),
            row=RelatedRow,
        ),
    )
    if not rows:
        raise UnknownEvent(event_id)
    found: list[StoredEvent] = [stored_of(row[EVENT:]) for row in rows if row.event_nid is not None]
    page = page_of(found, asked, deployment, Reorderings.of(rows[0].moved))
    return RelationsPage(
        page.chunk, page.start, page.end, page.gaps, LEVELS if wanted.recurse else None
    )


def _statements(direction: Direction, *, recurse: bool) -> tuple[LiteralString, LiteralString]:
    """The ordinary one, and that for after a move."""
    if recurse:
        return SQL_RECURSIVE, SQL_RECURSIVE_MOVED
    return (
        (SQL_BACKWARDS, SQL_BACKWARDS_MOVED)
        if direction == "b"
        else (SQL_FORWARDS, SQL_FORWARDS_MOVED)
    )
