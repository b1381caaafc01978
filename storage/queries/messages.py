"""Pages of a room's history, in topological order. A page is one statement, or two after moves.

A page ends at a position in the order, not at an offset. So events that arrive later do not shift
it. The limit is exact, because the statement checks visibility itself. `Gap` names history that is
missing within the range of the page. Backfill it, then request the page again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import USER_SEES, WITHHELD
from storage.database.connection import Connection
from storage.database.prepared import prepare_ahead
from storage.errors import UnknownRoom
from storage.ids import EventId, RoomId, UserId
from storage.queries.events import StoredEvent, StoredEventRow, stored_of
from storage.queries.filters import (
    ANY_EVENT,
    FILTER_VALUES,
    PART_IS_REQUESTED,
    PART_READER,
    EventFilter,
)
from storage.queries.pagination.page import (
    END,
    Gap,
    Page,
    PageRange,
    end_of_page,
    page_of,
)
from storage.queries.pagination.reordering import Reorderings, next_token
from storage.queries.pagination.statements import (
    PageStatements,
    fetch_page,
    page_statements,
)
from storage.streams import PaginationToken

TEMPLATE_PAGE: Final[LiteralString] = """
WITH
{reader},
origin AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, r.out_of_range, r.moves, reader.*
    FROM reader
    CROSS JOIN rooms r
    WHERE r.room_id = :room_id {and_not_reordered}
),
newer AS MATERIALIZED (  -- events that arrived after a timeline, if one is the lower end
    SELECT e.topological_ordering
    FROM origin r
    JOIN events e ON (e.room_nid, e.stream_ordering) > (r.room_nid, :lower_live)
        AND (e.room_nid, e.stream_ordering) <= (r.room_nid, 9223372036854775807)
    WHERE :lower_live < 9223372036854775807 AND :above = 0 AND NOT e.outlier
        AND NOT e.backfilled
),
-- no event of the range is below: beside a timeline the oldest of the newer events is the lowest
lowest AS MATERIALIZED (
    SELECT CASE WHEN :lower_live = 9223372036854775807 THEN :lower
        WHEN :above > 0 THEN :above ELSE (
        SELECT LEAST(:lower, COALESCE(min(topological_ordering) - 1, :lower)) FROM newer
    ) END AS topological_ordering
),
-- the topological ranges of the reader's audiences: the hidden events between them are not read
visible_range AS MATERIALIZED (
    SELECT r.room_nid, r.ignored, f.*, s.*
    FROM origin r
    CROSS JOIN filter_of(:types, :not_types, :senders, :not_senders, :contains_url) AS f
    CROSS JOIN lowest
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        CASE WHEN {forwards} THEN lowest.topological_ordering ELSE :upper END,
        CASE WHEN {forwards} THEN 0 ELSE :page_max + 1 END,
        CASE WHEN {forwards} THEN :page_max + 1 ELSE 0 END) AS s
),
{reordered}
{page_range},
page AS MATERIALIZED (
    {page}
),
last AS (  -- a full page ends here
    SELECT COALESCE((SELECT topological_ordering FROM page ORDER BY 1 {order} OFFSET :page_max
        LIMIT 1), {furthest}) AS topological_ordering
),
gap AS (  -- missing events with a child in the range of the page
    SELECT array_agg(m.event_id) AS ids, array_agg(e.topological_ordering) AS topological,
        array_agg(e.stream_ordering) AS stream
    FROM origin r
    JOIN missing_events m USING (room_nid)
    JOIN events e ON e.event_nid = ANY(m.child_nids)
    CROSS JOIN last
    WHERE NOT e.outlier
        AND ((e.topological_ordering, e.stream_ordering) <= (:upper, :upper_stream) {or_brought})
        -- a page back from a timeline also has the gap at which that one begins
        AND (e.backfilled OR e.stream_ordering <= :upper_live
            OR NOT {forwards} AND :upper < 9223372036854775807)
        AND {is_ahead}
        AND e.topological_ordering {passed} last.topological_ordering
)
SELECT gap.ids AS gap_ids, gap.topological AS gap_topological, gap.stream AS gap_stream,
    {forwards} AND COALESCE(
        (SELECT bool_or(highest = 9223372036854775807) FROM visible_range), false) AS is_open,
    page.withheld,
    {page_columns}
FROM origin r
CROSS JOIN gap
LEFT JOIN page ON true
ORDER BY page.topological_ordering {order}, page.stream_ordering {order}
"""

PARTS_PAGE: Final[dict[str, LiteralString]] = {
    "reader": PART_READER,
    "lowest": "(SELECT topological_ordering FROM lowest)",
    "once": "LIMIT 1",  # the ranges differ in nothing else
    "source": "e.room_nid = r.room_nid",
    "is_shown": PART_IS_REQUESTED,
    "and_columns": ", :withheld.of(r) AS withheld",
}

SQL_PAGE: Final[PageStatements] = page_statements(
    TEMPLATE_PAGE,
    PARTS_PAGE,
    USER_SEES,
    WITHHELD,
    room_id="text",
    user_id="text",
    ignored="text[]",
    **FILTER_VALUES,
)
prepare_ahead(SQL_PAGE.ordinary.backwards.sql, SQL_PAGE.ordinary.forwards.sql)


class TimelinePageRow(NamedTuple):
    """One event of a page. Each row has the gaps of the page, in arrays of equal length."""

    gap_ids: list[str] | None
    gap_topological: list[int] | None
    gap_stream: list[int] | None
    is_open: bool
    """Forwards: the reader may see events that arrive later."""
    withheld: bool | None
    """Its sender was erased, and the reader was not there: only the redacted form is shown."""
    # the columns of `PageRow`: as a row in a row they would take half as long again to make
    moves: int
    left_out_topological: list[int] | None
    left_out_levels: list[int] | None
    event: StoredEventRow | None


async def messages(
    conn: Connection,
    room_id: RoomId,
    user_id: UserId,
    page_range: PageRange,
    deployment: str,
    *,
    rows_max: int,
    ignored: list[UserId] | None = None,
    event_filter: EventFilter = ANY_EVENT,
) -> Page:
    """Return one page: exactly ``limit`` events that the user may see, unless there are no more.

    `UnknownRoom`.

    `InvalidToken` where more than ``rows_max`` moves have to be read for a token: each event that
    was reordered since, for each position of the token. Events of ``ignored`` senders are left out,
    but for state (client-server API, "Ignoring Users"). So are events that do not pass
    ``event_filter``.
    """
    reader = {"room_id": room_id, "user_id": user_id, "ignored": ignored}
    rows, page_range = await fetch_page(
        conn,
        SQL_PAGE,
        page_range,
        reader | event_filter.values,
        row=TimelinePageRow,
        deployment=deployment,
        rows_max=rows_max,
    )
    if not rows:
        raise UnknownRoom(room_id)
    return await _page(rows, page_range, deployment)


async def _page(rows: Sequence[TimelinePageRow], page_range: PageRange, deployment: str) -> Page:
    """Return the page with its gaps.

    A page backwards does not end at a gap below its events. One forwards does not end at the newest
    event, since others may follow.
    """
    events = [
        stored_of(row.event, withheld=bool(row.withheld)) for row in rows if row.event is not None
    ]
    first = rows[0]
    reorderings = Reorderings.of(first.moves, first.left_out_topological, first.left_out_levels)
    page = await page_of(events, page_range, deployment, reorderings)
    end = page.end
    if end is None and page.chunk and first.is_open and page_range.stop == END:
        end = end_of_page(page.chunk, page_range, reorderings).print(deployment)
    gaps = _gaps(first, page.chunk, page_range, more=end is not None)
    if end is None and page_range.direction == "b" and any(gap.after is None for gap in gaps):
        end = _end_at_gap(first, page.chunk, page_range, reorderings).print(deployment)
    return replace(page, end=end, gaps=gaps)


def _end_at_gap(
    row: TimelinePageRow,
    chunk: Sequence[StoredEvent],
    page_range: PageRange,
    reorderings: Reorderings,
) -> PaginationToken:
    """Return where a page backwards ends at a gap: above all that can be filled in there.

    For a page without events that is below the highest child of a gap. So a walk comes to its end
    even if nothing is filled in.
    """
    if chunk:
        return end_of_page(chunk, page_range, reorderings)
    topological, stream = max(zip(row.gap_topological or (), row.gap_stream or (), strict=True))
    end = PaginationToken(topological, stream - 1)
    return next_token(end, page_range.start, page_range.direction, reorderings)


def _gaps(
    row: TimelinePageRow, chunk: Sequence[StoredEvent], page_range: PageRange, *, more: bool
) -> list[Gap]:
    """Return the gaps in the order of the page. A gap lies before its child, visible or not."""
    if not row.gap_ids:
        return []
    oldest_first = list(chunk) if page_range.direction == "f" else list(reversed(chunk))
    positions = [
        (event.topological_ordering or 0, event.stream_ordering or 0) for event in oldest_first
    ]
    children = zip(row.gap_topological or (), row.gap_stream or (), strict=True)
    missing_by_index: dict[int, list[EventId]] = {}
    for event_id, child in zip(row.gap_ids, children, strict=True):
        index = next((index for index, at in enumerate(positions) if at >= child), len(positions))
        beyond = (
            (index == 0 and positions and child != positions[0])
            if page_range.direction == "b"
            else index == len(positions)
        )
        if not (more and beyond):  # else the next page has it
            missing_by_index.setdefault(index, []).append(EventId(event_id))
    ids: list[EventId | None] = [None, *(event.event_id for event in oldest_first), None]
    gaps = [
        Gap(tuple(sorted(set(missing_by_index[index]))), ids[index], ids[index + 1])
        for index in sorted(missing_by_index)
    ]
    return gaps if page_range.direction == "f" else gaps[::-1]
