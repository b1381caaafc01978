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
from storage.database.placeholders import compose, fill
from storage.database.prepared import prepare_ahead
from storage.errors import UnknownRoom
from storage.ids import EventId, RoomId, UserId
from storage.queries.events import TEMPLATE_EVENT, StoredEvent, StoredEventRow, stored_of
from storage.queries.filters import ANY_EVENT, FILTER_VALUES, TEMPLATE_IGNORED, EventFilter
from storage.queries.pagination.page import (
    END,
    PART_LEFT_OUT,
    PART_NONE_LEFT_OUT,
    PART_NOT_LEFT_OUT,
    PART_OR_BROUGHT,
    REORDERED_VALUES,
    TEMPLATE_NOT_LEFT_OUT_LIVE,
    TEMPLATE_REORDERED,
    Direction,
    Gap,
    Page,
    PageRange,
    end_of_page,
    exact,
    fetch_page,
    page_of,
)
from storage.queries.pagination.reordering import (
    Reorderings,
    lower_bound,
    lower_end,
    next_token,
    numbers,
    passed_positions,
    upper_end,
)
from storage.streams import PaginationToken

TEMPLATE_PAGE: Final[LiteralString] = """
WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = :user_id),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, r.out_of_range, r.moves, reader.principal_nid,
        {ignored} AS ignored
    FROM reader
    CROSS JOIN rooms r
    WHERE r.room_id = :room_id {and_not_reordered}
),
newer AS MATERIALIZED (  -- events that arrived after a timeline, if one is the lower end
    SELECT e.topological_ordering
    FROM room r
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
    FROM room r
    CROSS JOIN filter_of(:types, :not_types, :senders, :not_senders, :contains_url) AS f
    {ranges} AS s
),
{reordered}
page AS MATERIALIZED (  -- one event more than the limit shows that there are more
    SELECT e.*
    FROM (SELECT * FROM {range} ORDER BY {near_end} {order}) AS r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering,
            e.depth, e.redacted_by, e.rejected, e.soft_failed, e.outlier, e.redacted_form,
            e.encoding, e.json,
            :withheld.of(r) AS withheld
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= {upper}
            AND (e.backfilled OR e.stream_ordering <= :upper_live)
            AND {above_lower}
            AND (
                (e.topological_ordering, e.stream_ordering) > (:lower, :lower_stream)
                    {and_not_left_out}
                OR (
                    NOT e.backfilled AND e.stream_ordering > :lower_live
                        AND (e.topological_ordering, e.stream_ordering) > (:above, :above_stream)
                        {and_not_left_out_live}
                )
            )
            AND user_sees(e, :user_sees.of(r))
            AND not_ignored(e, r.ignored)
            AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
        ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
        LIMIT :page_max + 1
    ) AS e
    ORDER BY r.{near_end} {order}, e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT :page_max + 1
),
last AS (  -- a full page ends here
    SELECT (SELECT topological_ordering FROM page ORDER BY 1 {order} OFFSET :page_max
        LIMIT 1) AS topological_ordering
),
gap AS (  -- missing events with a child in the range of the page
    SELECT array_agg(m.event_id) AS ids, array_agg(e.topological_ordering) AS topological,
        array_agg(e.stream_ordering) AS stream
    FROM room r
    JOIN missing_events m USING (room_nid)
    JOIN events e ON e.event_nid = ANY(m.child_nids)
    CROSS JOIN last
    WHERE NOT e.outlier
        AND ((e.topological_ordering, e.stream_ordering) <= (:upper, :upper_stream) {or_brought})
        AND (e.backfilled OR e.stream_ordering <= :upper_live {or_at_a_timeline})
        AND (
            (e.topological_ordering, e.stream_ordering) > (:lower, :lower_stream)
                {and_not_left_out}
            OR (
                NOT e.backfilled AND e.stream_ordering > :lower_live
                    AND (e.topological_ordering, e.stream_ordering) > (:above, :above_stream)
                    {and_not_left_out_live}
            )
        )
        AND e.topological_ordering {comparison} COALESCE(last.topological_ordering, {furthest})
)
SELECT gap.ids AS gap_ids, gap.topological AS gap_topological, gap.stream AS gap_stream,
    r.moves, {left_out}, {is_open} AS is_open, page.withheld,
    {event}
FROM room r
CROSS JOIN gap
LEFT JOIN page ON true
ORDER BY page.topological_ordering {order}, page.stream_ordering {order}
"""
"""An end is `:upper` (topological), `:upper_stream` and `:upper_live`.

`:above` and `:above_stream` are the `lower_bound`. `:moves` are those that the tokens know.
"""

TEMPLATE_PAGE_RANGE: Final[LiteralString] = """
{reordered}
page_range AS (  -- each brought event is a range of its own
    SELECT s.*, s.lowest AS lower, 0::bigint AS lower_stream, LEAST(:upper, s.highest) AS upper,
        CASE WHEN s.highest < :upper THEN 9223372036854775807
            ELSE :upper_stream END AS upper_stream
    FROM visible_range s
    UNION ALL
    SELECT s.*, m.topological_ordering, m.stream_ordering, m.topological_ordering, m.stream_ordering
    FROM brought m
    CROSS JOIN (SELECT * FROM visible_range LIMIT 1) AS s
),
"""

PARTS_BACKWARDS: Final[dict[str, LiteralString]] = {
    "order": "DESC",
    "comparison": ">=",
    "furthest": "0",
    "ranges": """
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        :upper, :page_max + 1, 0)
    """,
    "or_at_a_timeline": "OR :upper < 9223372036854775807",
    "is_open": "false",
}
"""`or_at_a_timeline`: a page back from a timeline also has the gap at which that one begins."""

PARTS_FORWARDS: Final[dict[str, LiteralString]] = {
    "order": "ASC",
    "comparison": "<=",
    "furthest": "9223372036854775807",
    "ranges": """
    CROSS JOIN lowest
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        lowest.topological_ordering, 0, :page_max + 1)
    """,
    "or_at_a_timeline": "",
    "is_open": """
        COALESCE((SELECT bool_or(highest = 9223372036854775807) FROM visible_range), false)
    """,
}

PARTS_ORDINARY: Final[dict[str, LiteralString]] = {
    "and_not_reordered": "AND r.moves <= :moves",
    "reordered": "",
    "range": "visible_range",
    "upper": """
                (LEAST(:upper, r.highest), CASE
                    WHEN r.highest < :upper THEN 9223372036854775807 ELSE :upper_stream END)
    """,
    "above_lower": """
            e.topological_ordering >= GREATEST((SELECT topological_ordering FROM lowest), r.lowest)
    """,
    "or_brought": "",
    "and_not_left_out": "",
    "and_not_left_out_live": "",
}

PARTS_REORDERED: Final[dict[str, LiteralString]] = {
    "and_not_reordered": "",
    "range": "page_range",
    "upper": "(r.upper, r.upper_stream)",
    "above_lower": """
            (e.topological_ordering, e.stream_ordering)
                >= (GREATEST((SELECT topological_ordering FROM lowest), r.lower), r.lower_stream)
    """,
    "or_brought": PART_OR_BROUGHT,
    "and_not_left_out": PART_NOT_LEFT_OUT,
    "and_not_left_out_live": fill(TEMPLATE_NOT_LEFT_OUT_LIVE, behind=":behind"),
}

PART_EVENT: Final[LiteralString] = fill(TEMPLATE_EVENT, event="page", room="r")

PART_IGNORED: Final[LiteralString] = fill(TEMPLATE_IGNORED, reader=":user_id", named=":ignored")

PARTS_NUMBERS: Final[dict[str, LiteralString]] = {
    "room": "room",
    "upper": ":upper_numbers",
    "lower": ":lower_numbers",
    "rows_max": ":moves_max",
}

PAGE_VALUES: Final[dict[str, str]] = {
    "room_id": "text",
    "user_id": "text",
    "upper": "bigint",
    "upper_stream": "bigint",
    "upper_live": "bigint",
    "lower": "bigint",
    "lower_stream": "bigint",
    "lower_live": "bigint",
    "page_max": "bigint",
    "ignored": "text[]",
    **FILTER_VALUES,
    "above": "bigint",
    "above_stream": "bigint",
}
"""The parameters of a page. Then come the moves that the tokens know, or `REORDERED_VALUES`."""

SQL_BACKWARDS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_PAGE,
        ignored=PART_IGNORED,
        event=PART_EVENT,
        near_end="highest",
        left_out=PART_NONE_LEFT_OUT,
        **PARTS_BACKWARDS,
        **PARTS_ORDINARY,
    ),
    USER_SEES,
    WITHHELD,
    **PAGE_VALUES,
    moves="bigint",
).sql

SQL_FORWARDS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_PAGE,
        ignored=PART_IGNORED,
        event=PART_EVENT,
        near_end="lowest",
        left_out=PART_NONE_LEFT_OUT,
        **PARTS_FORWARDS,
        **PARTS_ORDINARY,
    ),
    USER_SEES,
    WITHHELD,
    **PAGE_VALUES,
    moves="bigint",
).sql
prepare_ahead(SQL_BACKWARDS, SQL_FORWARDS)

SQL_BACKWARDS_REORDERED: Final[LiteralString] = compose(
    fill(
        TEMPLATE_PAGE,
        ignored=PART_IGNORED,
        event=PART_EVENT,
        near_end="upper",
        left_out=PART_NONE_LEFT_OUT,
        reordered=fill(
            TEMPLATE_PAGE_RANGE,
            reordered=fill(TEMPLATE_REORDERED, forwards="false", **PARTS_NUMBERS),
        ),
        **PARTS_BACKWARDS,
        **PARTS_REORDERED,
    ),
    USER_SEES,
    WITHHELD,
    **PAGE_VALUES,
    **REORDERED_VALUES,
).sql

SQL_FORWARDS_REORDERED: Final[LiteralString] = compose(
    fill(
        TEMPLATE_PAGE,
        ignored=PART_IGNORED,
        event=PART_EVENT,
        near_end="lower",
        left_out=PART_LEFT_OUT,
        reordered=fill(
            TEMPLATE_PAGE_RANGE,
            reordered=fill(TEMPLATE_REORDERED, forwards="true", **PARTS_NUMBERS),
        ),
        **PARTS_FORWARDS,
        **PARTS_REORDERED,
    ),
    USER_SEES,
    WITHHELD,
    **PAGE_VALUES,
    **REORDERED_VALUES,
).sql


class PageRow(NamedTuple):
    """One event of a page; None if the page has no event.

    Every row has the gaps of the page, in arrays of equal length, and what `Reorderings.of` takes.
    """

    gap_ids: list[str] | None
    gap_topological: list[int] | None
    gap_stream: list[int] | None
    moves: int
    left_out_topological: list[int] | None
    left_out_levels: list[int] | None
    is_open: bool
    """Forwards: the reader may see events that arrive later."""
    withheld: bool | None
    """Its sender was erased, and the reader was not there: only the redacted form is shown."""
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
    requested_range, page_range = page_range, await exact(conn, page_range, room_id=room_id)
    upper, lower = page_range.upper, page_range.lower
    ordinary, reordered = _statements(page_range.direction)
    bounds = *upper_end(upper), *lower_end(lower)
    arguments = (
        *(room_id, user_id, *bounds, page_range.limit),
        *(ignored, *event_filter.arguments, *lower_bound(lower)),
    )
    reordering = numbers(upper), numbers(lower), rows_max, passed_positions(lower)
    rows = await fetch_page(
        page_range,
        deployment,
        lambda reorder_count: conn.fetch(ordinary, *arguments, reorder_count, row=PageRow),
        lambda: conn.fetch(reordered, *arguments, *reordering, row=PageRow),
        skip_ordinary=page_range is not requested_range,
    )
    if not rows:
        raise UnknownRoom(room_id)
    return await _page(rows, page_range, deployment)


def _statements(direction: Direction) -> tuple[LiteralString, LiteralString]:
    """Return the ordinary statement, and the one for reordered events."""
    if direction == "b":
        return SQL_BACKWARDS, SQL_BACKWARDS_REORDERED
    return SQL_FORWARDS, SQL_FORWARDS_REORDERED


async def _page(rows: Sequence[PageRow], page_range: PageRange, deployment: str) -> Page:
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
    gaps = _gaps(rows[0], page.chunk, page_range, more=end is not None)
    if end is None and page_range.direction == "b" and any(gap.after is None for gap in gaps):
        end = _end_at_gap(rows[0], page.chunk, page_range, reorderings).print(deployment)
    return replace(page, end=end, gaps=gaps)


def _end_at_gap(
    row: PageRow, chunk: Sequence[StoredEvent], page_range: PageRange, reorderings: Reorderings
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
    row: PageRow, chunk: Sequence[StoredEvent], page_range: PageRange, *, more: bool
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
