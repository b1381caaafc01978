"""The threads of a room, latest reply first. Client-server API, "Querying threads in a room".

No table lists the threads. `events_thread_idx` has the replies of a room in topological order. A
step reads the latest of them as a chunk, and looks up the last visible reply of each thread in it.
A thread belongs to the chunk if that reply is in it: threads with a later reply were on the pages
before. The next chunk begins where this one ends, and is larger. A page that has read
`Config.traversal_rows_max` replies ends early, and its `Page.end` goes on from there. With
"participated" it ends after `PARTICIPATED_ROWS_MAX` of them.

The id of a root is in the bytes of its replies only, so the roots are read by a second statement.
A root is a visible event that does not relate to another event itself, as for the aggregations.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, LiteralString, NamedTuple

from storage.codec import StoredBytes
from storage.database.columns import USER_SEES, WHOLE, WITHHELD
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.errors import UnknownRoom
from storage.ids import EventId, RoomId, UserId
from storage.queries import relations
from storage.queries.events import (
    ReaderEventRow,
    StoredEvent,
    related_id,
    served_at_once,
    stored_of,
)
from storage.queries.filters import PART_READER, TEMPLATE_RELATION_IS_VISIBLE
from storage.queries.pagination.page import Page
from storage.queries.pagination.statements import TEMPLATE_RANGE_EVENTS
from storage.streams import PaginationToken

Include = Literal["all", "participated"]

CHUNK: Final = 64
"""Replies in the first chunk. It grows with the limit, and from chunk to chunk by `GROWTH`."""
GROWTH: Final = 4
CHUNK_MAX: Final = 4_096
PARTICIPATED_ROWS_MAX: Final = 2_000
"""Replies that a page reads at most to find the threads of one user.

Each costs about 20 µs: the id of its root is in its bytes, and the root has the sender. A user who
took part in no thread would pay for `Config.traversal_rows_max` of them.
"""

TEMPLATE_THREADS: Final[LiteralString] = """
WITH
{reader},
room AS MATERIALIZED (
    SELECT r.room_nid, r.out_of_range, reader.*
    FROM reader
    CROSS JOIN rooms r
    WHERE r.room_id = :room_id
),
visible_range AS MATERIALIZED (
    SELECT r.room_nid, r.ignored, s.*, s.lowest AS lower, 0::bigint AS lower_stream,
        LEAST(s.highest, :below) AS upper, CASE WHEN s.highest < :below THEN 9223372036854775807
            ELSE :below_stream - 1 END AS upper_stream
    FROM room r
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        :below, :replies_max, 0) AS s
),
reply AS MATERIALIZED (  -- from the index alone, visible or not
    {replies}
),
chunk AS MATERIALIZED (  -- NULL as its end: there are no replies below
    SELECT CASE WHEN count(*) = :replies_max THEN min(topological_ordering) END AS topological
    FROM reply
),
ending AS MATERIALIZED (
    SELECT c.topological, (SELECT min(y.stream_ordering) FROM reply y
        WHERE y.topological_ordering = c.topological) AS stream
    FROM chunk c
),
reach AS MATERIALIZED (  -- a thread may have many replies after the reader left
    SELECT max(highest) AS highest FROM visible_range
),
thread AS (
    SELECT last.*
    FROM (SELECT DISTINCT relates_to FROM reply) AS t
    CROSS JOIN reach
    CROSS JOIN (SELECT * FROM visible_range LIMIT 1) AS v
    CROSS JOIN LATERAL (
        SELECT e.topological_ordering, e.stream_ordering, e.event_id, e.json
        FROM events e
        WHERE e.relates_to = t.relates_to AND e.rel_type_nid = (SELECT {REL_THREAD})
            AND e.room_nid + 0 = v.room_nid
            AND NOT e.outlier AND e.topological_ordering <= reach.highest
            AND {is_visible}
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT 1
    ) AS last
    WHERE (last.topological_ordering, last.stream_ordering) < (:below, :below_stream)
        AND (last.topological_ordering, last.stream_ordering)
            >= (SELECT COALESCE(topological, 0), COALESCE(stream, 0) FROM ending)
    ORDER BY last.topological_ordering DESC, last.stream_ordering DESC
    LIMIT :threads_max
)
SELECT (SELECT count(*) FROM reply) AS replies, n.topological AS ending_topological,
    n.stream AS ending_stream, t.topological_ordering, t.stream_ordering,
    t.event_id, t.json
FROM room r
CROSS JOIN ending n
LEFT JOIN thread t ON true
ORDER BY t.topological_ordering DESC, t.stream_ordering DESC
"""
"""`:replies_max`: the replies of the chunk."""

TEMPLATE_ROOTS: Final[LiteralString] = """
WITH
{reader},
room AS MATERIALIZED (
    SELECT r.room_nid, reader.*, v.*
    FROM reader
    CROSS JOIN rooms r
    CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
    WHERE r.room_id = :room_id
)
SELECT form.withheld, s.*
FROM room r
JOIN events e ON e.event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest(:root_ids) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
)) AND e.room_nid = r.room_nid
CROSS JOIN LATERAL (
    SELECT :withheld.of(r) AS withheld
) AS form
JOIN stored_events s USING (event_nid)
WHERE user_sees(e, :user_sees.of(r))
    AND (e.rel_type_nid IS NULL OR e.redacted_by IS NOT NULL OR form.withheld)
    AND (NOT :participated OR e.sender_nid = r.principal_nid OR EXISTS (
        SELECT
        FROM events e
        WHERE e.relates_to = relation_key(s.event_id) AND e.rel_type_nid = (SELECT {REL_THREAD})
            AND e.room_nid + 0 = r.room_nid AND NOT e.outlier
            AND e.sender_nid = r.principal_nid
            AND {is_visible}
    ))
"""
"""`:participated`: only threads in which the user participated."""

SQL_THREADS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_THREADS,
        reader=PART_READER,
        replies=fill(
            TEMPLATE_RANGE_EVENTS,
            ranges="(SELECT * FROM visible_range ORDER BY upper DESC)",
            by_range="r.upper DESC,",
            order="DESC",
            columns="e.relates_to, e.topological_ordering, e.stream_ordering",
            source="e.room_nid = r.room_nid",
            which="e.rel_type_nid = {REL_THREAD}",
            limit=":replies_max",
        ),
        is_visible=fill(TEMPLATE_RELATION_IS_VISIBLE, reader="v"),
    ),
    USER_SEES,
    WHOLE,
    room_id="text",
    user_id="text",
    ignored="text[]",
    below="bigint",
    below_stream="bigint",
    replies_max="bigint",
    threads_max="bigint",
).sql

SQL_ROOTS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_ROOTS,
        reader=PART_READER,
        is_visible=fill(TEMPLATE_RELATION_IS_VISIBLE, reader="r"),
    ),
    USER_SEES,
    WITHHELD,
    WHOLE,
    room_id="text",
    user_id="text",
    ignored="text[]",
    root_ids="text[]",
    participated="boolean",
).sql


class ThreadRow(NamedTuple):
    """A thread by its last visible reply, or no thread (NULL); with the chunk in each row.

    ``replies`` is the number of replies in the chunk. Its last one is at the ``ending``, NULL if
    there are no more.
    """

    replies: int
    ending_topological: int | None
    ending_stream: int | None
    topological_ordering: int | None
    stream_ordering: int | None
    event_id: str | None
    json: StoredBytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadsRequest:
    """A request for threads: whose, which, from where on, and how many."""

    room_id: RoomId
    user_id: UserId
    participated: bool
    start: PaginationToken
    limit: int
    rows_max: int
    ignored: list[UserId] | None = None


class Thread(NamedTuple):
    """The root of a thread, and the position of its last visible reply."""

    root: StoredEvent
    latest: PaginationToken


async def threads(conn: Connection, request: ThreadsRequest, deployment: str) -> Page:
    """Return a page of thread roots with their aggregations. `UnknownRoom`.

    Send two statements for each chunk of replies, and one for the aggregations. ``conn`` is in a
    REPEATABLE READ transaction.
    """
    listed: list[Thread] = []
    below: PaginationToken | None = request.start
    chunk, rows = max(CHUNK, 2 * request.limit), 0
    rows_max = request.rows_max
    if request.participated:
        rows_max = min(rows_max, PARTICIPATED_ROWS_MAX)
    while below is not None and len(listed) <= request.limit and rows < rows_max:
        step = await _step(conn, request, below, min(chunk, rows_max - rows))
        listed += step.threads
        below, rows, chunk = step.below, rows + step.replies, min(chunk * GROWTH, CHUNK_MAX)
    served = await served_at_once([thread.root for thread in listed[: request.limit]])
    if len(listed) > served:
        listed = listed[:served]
        below = listed[-1].latest if listed else request.start
    page = Page(
        [thread.root for thread in listed],
        request.start.print(deployment),
        None if below is None else below.print(deployment),
        [],
    )
    return await relations.of_page(conn, request.user_id, page, ignored=request.ignored)


class Step(NamedTuple):
    """The threads of a chunk, and where the next chunk begins (None: there are no more)."""

    threads: list[Thread]
    below: PaginationToken | None
    replies: int


async def _step(
    conn: Connection, request: ThreadsRequest, below: PaginationToken, chunk: int
) -> Step:
    """Read one chunk of replies, and the roots of its threads."""
    most = chunk if request.participated else request.limit + 1
    rows = await conn.fetch(
        SQL_THREADS,
        request.room_id,
        request.user_id,
        request.ignored,
        below.topological,
        below.stream,
        chunk,
        most,
        row=ThreadRow,
    )
    if not rows:
        raise UnknownRoom(request.room_id)
    latest = _latest(request.room_id, rows)
    roots = await _roots(conn, request, latest)
    threads = [Thread(roots[root_id], at) for root_id, at in latest.items() if root_id in roots]
    return Step(threads, _below(rows, most), rows[0].replies)


def _latest(room_id: RoomId, rows: Sequence[ThreadRow]) -> dict[EventId, PaginationToken]:
    """Return the position of the last reply of each thread, by the id of its root, in order."""
    return {
        related_id(row.json, row.event_id, room_id): PaginationToken(
            row.topological_ordering or 0, row.stream_ordering or 0
        )
        for row in rows
        if row.json is not None and row.event_id is not None
    }


def _below(rows: Sequence[ThreadRow], most: int) -> PaginationToken | None:
    """Return where to go on: below the last thread if there may be more, else below the chunk."""
    first, last = rows[0], rows[-1]
    if last.json is not None and len(rows) == most:
        return PaginationToken(last.topological_ordering or 0, last.stream_ordering or 0)
    if first.ending_topological is None:
        return None
    return PaginationToken(first.ending_topological, first.ending_stream or 0)


async def _roots(
    conn: Connection, request: ThreadsRequest, event_ids: Collection[EventId]
) -> dict[EventId, StoredEvent]:
    """Return the visible roots among these events, by id."""
    if not event_ids:
        return {}
    rows = await conn.fetch(
        SQL_ROOTS,
        request.room_id,
        request.user_id,
        request.ignored,
        list(event_ids),
        request.participated,
        row=ReaderEventRow,
    )
    return {row.event.event_id: stored_of(row.event, withheld=row.withheld) for row in rows}
