"""The statements of pages: a template for all directions, also for events that were reordered.

A module of pages has a template of its source: the room's order, the relations of an event, a time.
The direction and the parts that pages share are put in here:

    SQL_PAGE: Final[PageStatements] = page_statements(TEMPLATE_PAGE, PARTS_PAGE, room_id="text", …)

`order`, `near_end` and the others of `PARTS_BACKWARDS` are the direction. It is a part of the text,
since an index is read in one direction. `forwards` is `true` or `false`: the planner leaves out
what does not apply.

Each page has two statements for a direction. The ordinary one returns no row if the room has had
more moves than the tokens say. Then the reordered one runs. It also reads `reordered_events`, which
takes about a tenth of the time of a page.
"""

from collections.abc import Mapping
from typing import Any, Final, LiteralString, NamedTuple, TypeVar

from storage.database.connection import Connection
from storage.database.placeholders import (
    ColumnList,
    NumberedStatement,
    compose,
    fill,
    fill_all,
)
from storage.database.translate import TOO_MANY_MOVES
from storage.errors import DatabaseError, InvalidToken
from storage.queries.events import TEMPLATE_EVENT, StoredEventRow
from storage.queries.pagination.page import Direction, PageRange, exact
from storage.queries.pagination.reordering import (
    Reorderings,
    as_of,
    lower_bound,
    lower_end,
    numbers,
    passed_positions,
    upper_end,
)
from storage.streams.positions import LARGEST_POSITION

R = TypeVar("R", bound=NamedTuple)

# --------------------------------------------------------------------------------------------------
# The parts of the direction, and those of the ordinary and of the reordered statement.

PARTS_BACKWARDS: Final[dict[str, LiteralString]] = {
    "order": "DESC",
    "forwards": "false",
    "near_end": "upper",
    "ahead": "<=",
    "passed": ">=",
    "furthest": "-9223372036854775807 - 1",
}

PARTS_FORWARDS: Final[dict[str, LiteralString]] = {
    "order": "ASC",
    "forwards": "true",
    "near_end": "lower",
    "ahead": ">=",
    "passed": "<=",
    "furthest": "9223372036854775807",
}
"""`ahead` and `passed` compare with a position: what is still ahead of it, and what is passed.

`near_end` is the end of a range that is read first, `furthest` the position that ends nothing.
"""

PARTS_ORDINARY: Final[dict[str, LiteralString]] = {
    "and_not_reordered": "AND r.moves <= :moves",
    "reordered": "",
    "brought_ranges": "",
    "or_brought": "",
    "and_not_left_out": "",
    "and_not_left_out_live": "",
    "left_out": """
NULL::bigint[] AS left_out_topological, NULL::bigint[] AS left_out_levels
    """,
}

PARTS_REORDERED: Final[dict[str, LiteralString]] = {
    "and_not_reordered": "",
    "reordered": """
brought AS MATERIALIZED (  -- events that belong below the upper end, reordered to above it
    SELECT m.event_nid, m.topological_ordering, m.stream_ordering
    FROM origin r
    CROSS JOIN LATERAL reordered_across(r.room_nid, :upper_numbers, {forwards}, :moves_max) AS m
    WHERE r.moves > (:upper_numbers)[2]
),
left_out AS MATERIALIZED (  -- events that belong below the lower end, reordered to above it
    SELECT m.event_nid, m.topological_ordering, m.levels
    FROM origin r
    CROSS JOIN LATERAL reordered_across(r.room_nid, :lower_numbers, {forwards}, :moves_max) AS m
    WHERE r.moves > (:lower_numbers)[2]
),
    """,
    "brought_ranges": """
UNION ALL  -- each brought event is a range of its own
SELECT s.*, m.topological_ordering, m.stream_ordering, m.topological_ordering, m.stream_ordering
FROM brought m
CROSS JOIN (SELECT * FROM visible_range {once}) AS s
    """,
    "or_brought": "OR e.event_nid IN (SELECT event_nid FROM brought)",
    "and_not_left_out": "AND e.event_nid NOT IN (SELECT event_nid FROM left_out)",
    "and_not_left_out_live": """
AND e.event_nid NOT IN (SELECT event_nid FROM left_out WHERE levels & :behind <> 0)
    """,
    "left_out": """
CASE WHEN {forwards} THEN
    (SELECT array_agg(topological_ordering ORDER BY event_nid) FROM left_out)
END AS left_out_topological, CASE WHEN {forwards} THEN
    (SELECT array_agg(levels ORDER BY event_nid) FROM left_out)
END AS left_out_levels
    """,
}

# --------------------------------------------------------------------------------------------------
# The parts of a page. A module gives `lowest`, `once`, `source`, `is_shown` and `and_columns`.

TEMPLATE_RANGE_EVENTS: Final[LiteralString] = """
SELECT e.*
FROM {ranges} AS r
CROSS JOIN LATERAL (
    SELECT
        {columns}
    FROM events e
    WHERE {source}
        AND NOT e.outlier
        AND (e.topological_ordering, e.stream_ordering) <= (r.upper, r.upper_stream)
        AND (e.topological_ordering, e.stream_ordering) >= (r.lower, r.lower_stream)
        AND {which}
    ORDER BY e.topological_ordering {order}, e.stream_ordering {order}
    LIMIT {limit}
) AS e
ORDER BY {by_range} e.topological_ordering {order}, e.stream_ordering {order}
LIMIT {limit}
"""
"""The first events of some topological ranges. No event outside of them is read.

`ranges` that do not overlap are sorted, and `by_range` repeats that order: so no range is read
after the limit. It is empty for those that do.
"""

PARTS_PAGE: Final[dict[str, LiteralString]] = {
    "page_range": """
page_range AS (
    SELECT s.*, GREATEST({lowest}, s.lowest) AS lower, 0::bigint AS lower_stream,
        LEAST(:upper, s.highest) AS upper, CASE
        WHEN s.highest < :upper THEN 9223372036854775807 ELSE :upper_stream END AS upper_stream
    FROM visible_range s
    {brought_ranges}
)
    """,
    "page": TEMPLATE_RANGE_EVENTS,
    "ranges": "(SELECT * FROM page_range ORDER BY {near_end} {order})",
    "by_range": "r.{near_end} {order},",
    "columns": """
e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth, e.redacted_by,
e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding, e.json {and_columns}
    """,
    "which": """
(e.backfilled OR e.stream_ordering <= :upper_live)
AND {is_ahead}
AND {is_shown}
    """,
    "limit": ":page_max + 1",  # one more than the limit shows that there are more
    "is_ahead": """
(
    (e.topological_ordering, e.stream_ordering) > (:lower, :lower_stream) {and_not_left_out}
    OR (
        NOT e.backfilled AND e.stream_ordering > :lower_live
            AND (e.topological_ordering, e.stream_ordering) > (:above, :above_stream)
            {and_not_left_out_live}
    )
)
    """,
    "page_columns": "r.moves, {left_out}, {event}",
    "event": fill(TEMPLATE_EVENT, event="page", room="r"),
}
"""`page` are the first events of the ranges in `visible_range` that are ahead of the lower end.

An end is `:upper` (topological), `:upper_stream` and `:upper_live`. `:above` and `:above_stream`
are the `lower_bound`. `page_columns` are those of `PageRow`, and `origin` has the room of the page.
"""

RANGE_VALUES: Final[dict[str, str]] = {
    "upper": "bigint",
    "upper_stream": "bigint",
    "upper_live": "bigint",
    "lower": "bigint",
    "lower_stream": "bigint",
    "lower_live": "bigint",
    "above": "bigint",
    "above_stream": "bigint",
    "page_max": "bigint",
}

REORDERED_VALUES: Final[dict[str, str]] = {
    "upper_numbers": "bigint[]",
    "lower_numbers": "bigint[]",
    "moves_max": "bigint",
    "behind": "bigint",
}
"""`numbers` of both ends, the most moves to read, and `passed_positions`."""


class DirectedStatements(NamedTuple):
    """One statement in both directions."""

    backwards: NumberedStatement
    forwards: NumberedStatement

    def of(self, direction: Direction) -> NumberedStatement:
        return self.backwards if direction == "b" else self.forwards

    async def fetchrow(
        self, conn: Connection, direction: Direction, *arguments: object, row: type[R]
    ) -> R | None:
        """Return the first row of the statement in this direction, or None."""
        return await conn.fetchrow(self.of(direction).sql, *arguments, row=row)


class PageStatements(NamedTuple):
    """The statements of one source of pages. The ordinary ones take `:moves` of the tokens."""

    ordinary: DirectedStatements
    reordered: DirectedStatements


def directed_statements(
    template: LiteralString,
    parts: Mapping[str, LiteralString],
    *inputs: ColumnList,
    **values: str,
) -> DirectedStatements:
    """Return a statement in both directions. A part may name other parts, and the direction's.

    Call it at module level only, as `fill` and `compose`, with constants.
    """
    backwards, forwards = (
        compose(fill_all(template, {**parts, **direction}), *inputs, **values)
        for direction in (PARTS_BACKWARDS, PARTS_FORWARDS)
    )
    return DirectedStatements(backwards, forwards)


def page_statements(
    template: LiteralString,
    parts: Mapping[str, LiteralString],
    *inputs: ColumnList,
    **values: str,
) -> PageStatements:
    """Return the four statements of a page: see `directed_statements`."""
    ordinary = {**PARTS_PAGE, **PARTS_ORDINARY, **parts}
    reordered = {**PARTS_PAGE, **PARTS_REORDERED, **parts}
    values = values | RANGE_VALUES
    return PageStatements(
        directed_statements(template, ordinary, *inputs, **values, moves="bigint"),
        directed_statements(template, reordered, *inputs, **values, **REORDERED_VALUES),
    )


# --------------------------------------------------------------------------------------------------
# The rows of a page: by the ordinary statement, or by the one for reordered events.


class PageRow(NamedTuple):
    """One event of a page. Each row has what `Reorderings.of` takes, also if there is no event."""

    moves: int
    left_out_topological: list[int] | None
    left_out_levels: list[int] | None
    event: StoredEventRow | None

    @property
    def reorderings(self) -> Reorderings:
        return Reorderings.of(self.moves, self.left_out_topological, self.left_out_levels)


def range_values(page_range: PageRange) -> dict[str, object]:
    """Return the values of `RANGE_VALUES`."""
    upper, lower = page_range.upper, page_range.lower
    ends = *upper_end(upper), *lower_end(lower), *lower_bound(lower), page_range.limit
    return dict(zip(RANGE_VALUES, ends, strict=True))


async def fetch_page(
    conn: Connection,
    statements: PageStatements,
    requested: PageRange,
    values: Mapping[str, Any],
    *,
    row: type[R],
    deployment: str,
    rows_max: int,
) -> tuple[list[R], PageRange]:
    """Return the rows of a page, and its range with the sync tokens as they are in this room.

    These are the rows of the ordinary statement, or of the reordered one if that gives none. The
    ordinary one gets the number of moves that the tokens know. It gives no row for a room with more
    moves, or where the user sees nothing. After a statement for the sync tokens the reordered one
    runs at once, that a page takes two. `InvalidToken` where there are more than ``rows_max`` moves
    to read.
    """
    room_id, event_id = values.get("room_id"), values.get("event_id")
    page_range = await exact(conn, requested, room_id=room_id, event_id=event_id)
    direction, upper, lower = page_range.direction, page_range.upper, page_range.lower
    reorder_count = min(as_of(upper), as_of(lower))
    if page_range is requested or reorder_count == LARGEST_POSITION:
        ordinary = statements.ordinary.of(direction)
        known = {**values, **range_values(page_range), "moves": reorder_count}
        rows = await conn.fetch(ordinary.sql, *ordinary.bind(known), row=row)
        if rows or reorder_count == LARGEST_POSITION:
            return rows, page_range
    reordered = statements.reordered.of(direction)
    moved = numbers(upper), numbers(lower), rows_max, passed_positions(lower)
    moves = dict(zip(REORDERED_VALUES, moved, strict=True))
    arguments = reordered.bind({**values, **range_values(page_range), **moves})
    try:
        return await conn.fetch(reordered.sql, *arguments, row=row), page_range
    except DatabaseError as error:
        if error.sqlstate != TOO_MANY_MOVES:
            raise
        token = min(page_range.start, page_range.stop, key=as_of)
        raise InvalidToken(
            token.print(deployment),
            "too many events of the room have moved since: begin the walk anew",
        ) from error
