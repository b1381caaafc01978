"""Pages of a room's history, in topological order, in one statement each, or two where events have moved since a token was made.

A page ends where the next one begins: `Page.end` is a place in the order, not an offset, so that events that arrive in the
meantime neither shift it nor fall through. The limit is exact, as visibility is part of the query. Where history is missing
within the stretch that a page covers, the page says so (`Gap`), so that it can be backfilled and asked for again.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, LiteralString, NamedTuple, TypeVar

from storage.database.connection import Connection
from storage.database.translate import TOO_MANY_MOVES
from storage.errors import DatabaseError, InputError, InvalidToken, UnknownRoom
from storage.ids import EventId, RoomId, UserId
from storage.queries.events import StoredEvent, stored_of
from storage.queries.filters import ANY_EVENT, EventFilter
from storage.queries.pagination.messages_reordered import SQL_BACKWARDS_MOVED, SQL_FORWARDS_MOVED
from storage.queries.pagination.reordering import (
    Reorderings,
    above,
    ahead,
    as_of,
    behind,
    lower_end,
    numbers,
    upper_end,
    walking,
)
from storage.queries.sync.positions import events_of, reached
from storage.streams import PaginationToken, SyncToken, VectorPosition
from storage.streams.positions import LARGEST_POSITION
from storage.streams.tokens import is_sync_token

Direction = Literal["b", "f"]
_Row = TypeVar("_Row")

SQL_BACKWARDS: Final[LiteralString] = """
WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, r.out_of_range, r.moves, reader.principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY($10::text[])) AS ignored
    FROM reader
    CROSS JOIN rooms r
    -- else the tokens are to be read with care (pagination/messages_reordered.py)
    WHERE r.room_id = $1::text AND r.moves <= $16::bigint
),
newer AS MATERIALIZED (  -- what has arrived since a timeline, where one bounds the stretch
    SELECT e.topological_ordering
    FROM room r
    JOIN events e ON e.room_nid = r.room_nid AND e.stream_ordering > $8::bigint
    WHERE $8::bigint < 9223372036854775807 AND $17::bigint = 0 AND NOT e.outlier
        AND NOT e.backfilled
),
-- where in the order the reader's audiences lie: what is hidden between is not looked at
stretch AS MATERIALIZED (
    SELECT r.room_nid, r.ignored, f.*, stretch.*
    FROM room r
    CROSS JOIN filter_of($11::text[], $12::text[], $13::text[], $14::text[], $15::boolean) AS f
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        $3::bigint, $9::bigint + 1, 0) AS stretch
),
-- where to stop at the latest: what lies before `to`, beside a timeline, ends at the oldest event
-- of that
lowest AS MATERIALIZED (
    SELECT CASE WHEN $8::bigint = 9223372036854775807 THEN $6::bigint
        WHEN $17::bigint > 0 THEN $17::bigint ELSE (
        SELECT LEAST($6::bigint, COALESCE(min(topological_ordering) - 1, $6::bigint)) FROM newer
    ) END AS topological_ordering
),
-- before `from`, after `to`; one more than asked for, to know whether there are more
page AS MATERIALIZED (
    SELECT e.*
    FROM (SELECT * FROM stretch ORDER BY highest DESC) AS r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth,
            e.redacted_by, e.rejected, e.soft_failed,
            e.outlier, e.redacted_form, e.encoding, e.json,
            NOT was_there(e, r.joined_since, r.joined_audiences)
                AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering)
                <= (LEAST($3::bigint, r.highest), CASE
                    WHEN r.highest < $3::bigint THEN 9223372036854775807 ELSE $4::bigint END)
            AND (e.backfilled OR e.stream_ordering <= $5::bigint)
            AND e.topological_ordering >= GREATEST((SELECT topological_ordering FROM lowest),
                r.lowest)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($6::bigint, $7::bigint)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $8::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($17::bigint, $18::bigint)
                )
            )
            AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences,
                r.shared_before, r.reader_nid, r.unread)
            AND not_ignored(e, r.ignored)
            AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $9::bigint + 1
    ) AS e
    ORDER BY r.highest DESC, e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $9::bigint + 1
),
covered AS (  -- how far the page goes, if it is full
    SELECT (SELECT topological_ordering FROM page ORDER BY 1 DESC OFFSET $9::bigint
        LIMIT 1) AS topological_ordering
),
gap AS (  -- missing events whose children stand in what the page covers
    SELECT array_agg(m.event_id) AS ids, array_agg(c.topological_ordering) AS topological,
        array_agg(c.stream_ordering) AS stream
    FROM room r
    JOIN missing_events m USING (room_nid)
    JOIN events c ON c.event_nid = ANY(m.child_nids)
    CROSS JOIN covered
    WHERE NOT c.outlier
        AND (c.topological_ordering, c.stream_ordering) <= ($3::bigint, $4::bigint)
        -- the gap at which a timeline begins, too
        AND (c.backfilled OR c.stream_ordering <= $5::bigint OR $3::bigint < 9223372036854775807)
        AND (
            (c.topological_ordering, c.stream_ordering) > ($6::bigint, $7::bigint)
            OR (
                NOT c.backfilled AND c.stream_ordering > $8::bigint
                    AND (c.topological_ordering, c.stream_ordering) > ($17::bigint, $18::bigint)
            )
        )
        AND c.topological_ordering >= COALESCE(covered.topological_ordering, 0)
)
SELECT gap.ids AS gap_ids, gap.topological AS gap_topological, gap.stream AS gap_stream,
    CASE WHEN room.moves > 0 THEN ARRAY[room.moves] END AS moved, page.withheld,
    page.event_nid, page.event_id, room.room_id, room.room_version, page.stream_ordering,
        page.topological_ordering, page.depth,
    (SELECT b.event_id FROM events b WHERE b.event_nid = page.redacted_by) AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding, page.json
FROM room
CROSS JOIN gap
LEFT JOIN page ON true
ORDER BY page.topological_ordering DESC, page.stream_ordering DESC
"""

SQL_FORWARDS: Final[LiteralString] = """
WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, r.out_of_range, r.moves, reader.principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY($10::text[])) AS ignored
    FROM reader
    CROSS JOIN rooms r
    -- else the tokens are to be read with care (pagination/messages_reordered.py)
    WHERE r.room_id = $1::text AND r.moves <= $16::bigint
),
newer AS MATERIALIZED (  -- what has arrived since a timeline, where one bounds the stretch
    SELECT e.topological_ordering
    FROM room r
    JOIN events e ON e.room_nid = r.room_nid AND e.stream_ordering > $5::bigint
    WHERE $5::bigint < 9223372036854775807 AND $17::bigint = 0 AND NOT e.outlier
        AND NOT e.backfilled
),
-- where to begin: of what lies after `from`, beside a timeline, the oldest event
lowest AS MATERIALIZED (
    SELECT CASE WHEN $5::bigint = 9223372036854775807 THEN $3::bigint
        WHEN $17::bigint > 0 THEN $17::bigint ELSE (
        SELECT LEAST($3::bigint, COALESCE(min(topological_ordering) - 1, $3::bigint)) FROM newer
    ) END AS topological_ordering
),
-- where in the order the reader's audiences lie: what is hidden between is not looked at
stretch AS MATERIALIZED (
    SELECT r.room_nid, r.ignored, f.*, stretch.*
    FROM room r
    CROSS JOIN filter_of($11::text[], $12::text[], $13::text[], $14::text[], $15::boolean) AS f
    CROSS JOIN lowest
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        lowest.topological_ordering, 0, $9::bigint + 1)
        AS stretch
),
-- after `from`, before `to`; one more than asked for, to know whether there are more
page AS MATERIALIZED (
    SELECT e.*
    FROM (SELECT * FROM stretch ORDER BY lowest) AS r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth,
            e.redacted_by, e.rejected, e.soft_failed,
            e.outlier, e.redacted_form, e.encoding, e.json,
            NOT was_there(e, r.joined_since, r.joined_audiences)
                AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier
            AND e.topological_ordering >= GREATEST((SELECT topological_ordering FROM lowest),
                r.lowest)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($3::bigint, $4::bigint)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $5::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($17::bigint, $18::bigint)
                )
            )
            AND (e.topological_ordering, e.stream_ordering)
                <= (LEAST($6::bigint, r.highest), CASE
                    WHEN r.highest < $6::bigint THEN 9223372036854775807 ELSE $7::bigint END)
            AND (e.backfilled OR e.stream_ordering <= $8::bigint)
            AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences,
                r.shared_before, r.reader_nid, r.unread)
            AND not_ignored(e, r.ignored)
            AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
        ORDER BY e.topological_ordering, e.stream_ordering
        LIMIT $9::bigint + 1
    ) AS e
    ORDER BY r.lowest, e.topological_ordering, e.stream_ordering
    LIMIT $9::bigint + 1
),
covered AS (  -- how far the page goes, if it is full
    SELECT (SELECT topological_ordering FROM page ORDER BY 1 OFFSET $9::bigint
        LIMIT 1) AS topological_ordering
),
gap AS (  -- missing events whose children stand in what the page covers
    SELECT array_agg(m.event_id) AS ids, array_agg(c.topological_ordering) AS topological,
        array_agg(c.stream_ordering) AS stream
    FROM room r
    JOIN missing_events m USING (room_nid)
    JOIN events c ON c.event_nid = ANY(m.child_nids)
    CROSS JOIN covered
    WHERE NOT c.outlier
        AND (
            (c.topological_ordering, c.stream_ordering) > ($3::bigint, $4::bigint)
            OR (
                NOT c.backfilled AND c.stream_ordering > $5::bigint
                    AND (c.topological_ordering, c.stream_ordering) > ($17::bigint, $18::bigint)
            )
        )
        AND (c.topological_ordering, c.stream_ordering) <= ($6::bigint, $7::bigint)
        AND (c.backfilled OR c.stream_ordering <= $8::bigint)
        AND c.topological_ordering <= COALESCE(covered.topological_ordering, 9223372036854775807)
)
SELECT gap.ids AS gap_ids, gap.topological AS gap_topological, gap.stream AS gap_stream,
    CASE WHEN room.moves > 0 THEN ARRAY[room.moves] END AS moved, page.withheld,
    page.event_nid, page.event_id, room.room_id, room.room_version, page.stream_ordering,
        page.topological_ordering, page.depth,
    (SELECT b.event_id FROM events b WHERE b.event_nid = page.redacted_by) AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding, page.json
FROM room
CROSS JOIN gap
LEFT JOIN page ON true
ORDER BY page.topological_ordering, page.stream_ordering
"""


SQL_COVERED: Final[LiteralString] = """
WITH
room AS MATERIALIZED (
    SELECT room_nid FROM rooms WHERE room_id = $1::text
    UNION ALL
    SELECT room_nid FROM events WHERE event_id = $2::text
),
writer AS MATERIALIZED (  -- those that are further than the others in each token
    SELECT * FROM unnest($6::int[], $7::text[], $8::bigint[]) AS p (token, instance_name, stream_id)
)
SELECT t.token, COALESCE(late.before, late.last, t.least) AS live
FROM unnest($3::int[], $4::bigint[], $5::bigint[]) AS t (token, least, furthest)
CROSS JOIN room r
-- the last of what it covers, not of what it could: what is committed from now on comes after that
CROSS JOIN LATERAL (
    SELECT min(e.stream_ordering)
        FILTER (WHERE e.stream_ordering > COALESCE(p.stream_id, t.least)) - 1 AS before,
            max(e.stream_ordering) AS last
    FROM events e
    JOIN writers w USING (writer_nid)
    LEFT JOIN writer p ON p.token = t.token AND p.instance_name = w.instance_name
    -- so that only an index by room fits (sync/rooms.py)
    WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, t.least)
        AND (e.room_nid, e.stream_ordering) <= (r.room_nid, t.furthest)
        AND e.room_nid BETWEEN r.room_nid AND r.room_nid
        AND NOT e.outlier AND NOT e.backfilled
) AS late
"""


class TokenPositionsRow(NamedTuple):
    """Up to where in the room's stream a token reaches, by its number."""

    token: int
    live: int


class PageRow(NamedTuple):
    """One event of a page; the columns of the event are None if it has none.

    Every row has the page's gaps, three columns in step, and what has moved.
    """

    gap_ids: list[str] | None
    gap_topological: list[int] | None
    gap_stream: list[int] | None
    moved: list[int] | None
    """For `Reorderings.of`."""
    withheld: bool | None
    """Its sender was erased, and the reader not there: only the redacted form is shown."""
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


EVENT: Final = PageRow._fields.index("event_nid")
"""Where the columns of the event begin."""

BEGINNING: Final = PaginationToken(0, 0)
END: Final = PaginationToken(LARGEST_POSITION, LARGEST_POSITION)


@dataclass(frozen=True, slots=True)
class Gap:
    """History that is missing within a page: `backfill_from` are parents that are not held; ask for them over federation.

    ``after`` and ``before`` are the events of the page between which it lies, by age (the older one, the newer one): None where it
    lies at the end of the page. A page backwards with a gap after None stops there: `Page.end` goes on with what is backfilled.
    """

    backfill_from: tuple[EventId, ...]
    after: EventId | None
    before: EventId | None


@dataclass(frozen=True, slots=True)
class Page:
    """A range of history in the direction of the request.

    ``end`` is where the next page begins; None: there is no more.

    What `gaps` name is missing: append it with origin "backfill" and ask for the page again, or go
    on: events that move up by that are met all the same, each once
    (`storage.queries.pagination.reordering`). A page backwards that reaches the oldest held event,
    and a gap below it, is short and has an ``end``. Backfill first: until then the next pages are
    empty, one for each event at such a gap at most, and the last one has no ``end``.
    """

    chunk: list[StoredEvent]
    start: str
    end: str | None
    gaps: list[Gap]


class PageRange(NamedTuple):
    """A stretch of a room's order and the way through it."""

    start: PaginationToken
    stop: PaginationToken
    direction: Direction
    limit: int
    synced: tuple[VectorPosition | None, VectorPosition | None] = (None, None)
    """Of tokens of sync, where each writer was."""


def between(
    from_: str | None, to: str | None, direction: Direction, limit: int, deployment: str
) -> PageRange:
    """The stretch that two tokens name, of pages or of sync. `InvalidToken`, `InputError`."""
    if direction not in ("b", "f"):
        raise InputError(f"direction {direction!r}: b or f")
    ends = (END, BEGINNING) if direction == "b" else (BEGINNING, END)
    start = ends[0] if from_ is None else place(from_, deployment)
    stop = ends[1] if to is None else place(to, deployment)
    return PageRange(
        walking(start, direction),
        stop,
        direction,
        limit,
        (_synced(from_, deployment), _synced(to, deployment)),
    )


def _synced(token: str | None, deployment: str) -> VectorPosition | None:
    return (
        events_of(SyncToken.parse(token, deployment))
        if token is not None and is_sync_token(token)
        else None
    )


async def exact(
    conn: Connection,
    asked: PageRange,
    *,
    room_id: RoomId | None = None,
    event_id: EventId | None = None,
) -> PageRange:
    """The stretch, with the places of tokens of sync as they are in this room, or in that of the event. One statement, or none.

    Where a writer was behind, the furthest position of a token covers too much. Within a room positions are in the order of commits, so the
    token covers what lies before the first event that it does not cover.
    """
    behind = [
        (token, position)
        for token, position in enumerate(asked.synced)
        if position is not None and position.items
    ]
    if not behind:
        return asked
    ends = [(token, position.min, position.furthest()) for token, position in behind]
    writers = [(token, writer, at) for token, position in behind for writer, at in position.items]
    columns = *map(list, zip(*ends, strict=True)), *map(list, zip(*writers, strict=True))
    live = {
        row.token: row.live
        for row in await conn.fetch(SQL_COVERED, room_id, event_id, *columns, row=TokenPositionsRow)
    }
    start, stop = (
        replace(end, live=live.get(token, end.live))
        for token, end in enumerate((asked.start, asked.stop))
    )
    return asked._replace(start=start, stop=stop)


def place(token: str, deployment: str) -> PaginationToken:
    """The place that a token names: of a page, or of a sync (everything that had arrived by then)."""
    if is_sync_token(token):
        return PaginationToken(
            LARGEST_POSITION, LARGEST_POSITION, reached(SyncToken.parse(token, deployment))
        )
    return PaginationToken.parse(token, deployment)


async def messages(
    conn: Connection,
    room_id: RoomId,
    user_id: UserId,
    asked: PageRange,
    deployment: str,
    *,
    rows_max: int,
    ignored: Collection[UserId] = (),
    wanted: EventFilter = ANY_EVENT,
) -> Page:
    """One page: exactly ``limit`` events that the user may see, unless there are no more.

    `UnknownRoom`.

    `InvalidToken` where more than ``rows_max`` moves are to be read for a token: each event that
    has moved since it was made, for each of its places. What the ``ignored`` have sent is left out,
    but for state (client-server API, "Ignoring Users"); so is what is not ``wanted``.
    """
    given, asked = asked, await exact(conn, asked, room_id=room_id)
    backwards = asked.direction == "b"
    bounds = (
        upper_end(asked.start) + lower_end(asked.stop)
        if backwards
        else lower_end(asked.start) + upper_end(asked.stop)
    )
    arguments = room_id, user_id, *bounds, asked.limit, list(ignored), *wanted.arguments
    ends, lower = (
        (numbers(asked.start), numbers(asked.stop)),
        asked.stop if backwards else asked.start,
    )
    ordinary, moved = (
        (SQL_BACKWARDS, SQL_BACKWARDS_MOVED) if backwards else (SQL_FORWARDS, SQL_FORWARDS_MOVED)
    )
    rows = await with_care(
        asked,
        deployment,
        asked is not given,
        lambda moves: conn.fetch(ordinary, *arguments, moves, *above(lower), row=PageRow),
        lambda: conn.fetch(
            moved, *arguments, *ends, rows_max, *above(lower), behind(lower), row=PageRow
        ),
    )
    if not rows:
        raise UnknownRoom(room_id)
    found = [
        stored_of(row[EVENT:], withheld=bool(row.withheld))
        for row in rows
        if row.event_nid is not None
    ]
    moved_now = Reorderings.of(rows[0].moved)
    page = page_of(found, asked, deployment, moved_now)
    gaps = _gaps(rows[0], page.chunk, asked, more=page.end is not None)
    if page.end is None and any(gap.after is None for gap in gaps) and backwards:
        page = replace(
            page, end=_end_at_gap(rows[0], page.chunk, asked, moved_now).print(deployment)
        )
    return replace(page, gaps=gaps)


async def with_care(
    asked: PageRange,
    deployment: str,
    was_asked: bool,
    ordinary: Callable[[int], Awaitable[list[_Row]]],
    moved: Callable[[], Awaitable[list[_Row]]],
) -> list[_Row]:
    """The rows of the ordinary statement if there are no more moves than when the tokens were made, else of the one that reads what has moved.

    The former gives none for a room that has had more moves than it is told, or where there is nothing to be seen. Where a statement was
    asked before, the latter alone, so that a page takes two. `InvalidToken` where it refuses, as there are too many.
    """
    moves = min(as_of(asked.start), as_of(asked.stop))
    if moves == LARGEST_POSITION:
        return await ordinary(moves)
    try:
        return (not was_asked and await ordinary(moves)) or await moved()
    except DatabaseError as error:
        if error.sqlstate != TOO_MANY_MOVES:
            raise
        token = min(asked.start, asked.stop, key=as_of)
        raise InvalidToken(
            token.print(deployment),
            "too many events of the room have moved since: begin the walk anew",
        ) from error


def page_of(
    found: Sequence[StoredEvent], asked: PageRange, deployment: str, moved: Reorderings
) -> Page:
    """The page of what was found for it: one event more than asked for if there are more.

    Without gaps.
    """
    chunk, more = list(found[: asked.limit]), len(found) > asked.limit
    begun = not chunk or asked.start not in (BEGINNING, END)
    start = asked.start if begun else edge(chunk[0], asked.direction, first=True, moves=moved.moves)
    return Page(
        chunk,
        start.print(deployment),
        _end(chunk, asked, moved).print(deployment) if more else None,
        [],
    )


def edge(
    event: StoredEvent, direction: Direction, *, first: bool, moves: int = 0
) -> PaginationToken:
    """The place on the near side of the first, or the far side of the last event of a page in this direction, as of so many moves."""
    topological, stream = event.topological_ordering or 0, event.stream_ordering or 0
    return PaginationToken(
        topological, stream if (direction == "b") == first else stream - 1, moves=moves
    )


def _end(chunk: Sequence[StoredEvent], asked: PageRange, moved: Reorderings) -> PaginationToken:
    """Where a full page ends; where it began if nothing was asked for.

    It stays beside the timeline that the walk started from.
    """
    return (
        ahead(edge(chunk[-1], asked.direction, first=False), asked.start, asked.direction, moved)
        if chunk
        else asked.start
    )


def _end_at_gap(
    row: PageRow, chunk: Sequence[StoredEvent], asked: PageRange, moved: Reorderings
) -> PaginationToken:
    """Where a page backwards ends at which history is missing: above all that can be filled in there.

    Without events that is below the highest child of a gap, so that a walk comes to its end though nothing is filled in.
    """
    if chunk:
        return _end(chunk, asked, moved)
    topological, stream = max(zip(row.gap_topological or (), row.gap_stream or (), strict=True))
    return ahead(PaginationToken(topological, stream - 1), asked.start, asked.direction, moved)


def _gaps(row: PageRow, chunk: Sequence[StoredEvent], asked: PageRange, *, more: bool) -> list[Gap]:
    """The gaps of the page in its order. A gap lies before its child, which need not be visible."""
    if not row.gap_ids:
        return []
    oldest_first = list(chunk) if asked.direction == "f" else list(reversed(chunk))
    places = [
        (event.topological_ordering or 0, event.stream_ordering or 0) for event in oldest_first
    ]
    children = zip(row.gap_topological or (), row.gap_stream or (), strict=True)
    found: dict[int, list[EventId]] = {}
    for event_id, child in zip(row.gap_ids, children, strict=True):
        index = next((index for index, at in enumerate(places) if at >= child), len(places))
        beyond = (
            (index == 0 and places and child != places[0])
            if asked.direction == "b"
            else index == len(places)
        )
        if not (more and beyond):  # else it is the next page's
            found.setdefault(index, []).append(EventId(event_id))
    ids: list[EventId | None] = [None, *(event.event_id for event in oldest_first), None]
    gaps = [
        Gap(tuple(sorted(set(found[index]))), ids[index], ids[index + 1]) for index in sorted(found)
    ]
    return gaps if asked.direction == "f" else gaps[::-1]
