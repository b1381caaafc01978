"""Sync tokens as ends of a page range, of a time when some writers were behind others.

The furthest position of such a token covers too much. Within a room stream orderings are in the
order of commits. So the token covers the events before the first one that it does not cover.
"""

from dataclasses import replace
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import EventId, RoomId
from storage.queries.pagination.page import PageRange

SQL_COVERED: Final[LiteralString] = """
WITH
room AS MATERIALIZED (
    SELECT room_nid FROM rooms WHERE room_id = $1::text
    UNION ALL
    SELECT room_nid FROM events WHERE event_id = $2::text
),
writer AS MATERIALIZED (  -- of each token, the writers that are further than the others
    SELECT * FROM unnest($6::int[], $7::text[], $8::bigint[]) AS p (token, instance_name, stream_id)
)
SELECT t.token, COALESCE(late.before, late.last, t.least) AS live
FROM unnest($3::int[], $4::bigint[], $5::bigint[]) AS t (token, least, furthest)
CROSS JOIN room r
-- the last event that it covers, not its furthest position: events that commit later come after it
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
    """The last stream ordering of the room that a token covers. ``token``: 0 start, 1 stop."""

    token: int
    live: int


async def exact(
    conn: Connection,
    page_range: PageRange,
    *,
    room_id: RoomId | None = None,
    event_id: EventId | None = None,
) -> PageRange:
    """Return the range with its sync tokens as they are in this room, or in the event's room.

    Send one statement, or none where no writer was behind.
    """
    lagging = [
        (token, position)
        for token, position in enumerate(page_range.synced)
        if position is not None and position.items
    ]
    if not lagging:
        return page_range
    ends = [(token, position.min, position.furthest()) for token, position in lagging]
    writers = [(token, writer, at) for token, position in lagging for writer, at in position.items]
    columns = *map(list, zip(*ends, strict=True)), *map(list, zip(*writers, strict=True))
    rows = await conn.fetch(SQL_COVERED, room_id, event_id, *columns, row=TokenPositionsRow)
    live = {row.token: row.live for row in rows}
    start, stop = (
        replace(end, live=live.get(token, end.live))
        for token, end in enumerate((page_range.start, page_range.stop))
    )
    return page_range._replace(start=start, stop=stop)
