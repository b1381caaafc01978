"""SQL parts that the paging queries share: the CTEs and conditions for reordered events.

Each paging query has two statements for a direction. The ordinary one returns no row if the room
has had more moves than the tokens say. Then the reordered one runs: it has these parts. It also
reads `reordered_events`, which takes about a tenth of the time of a page.
"""

from typing import Final, LiteralString

TEMPLATE_REORDERED: Final[LiteralString] = """
brought AS MATERIALIZED (  -- events that belong below the upper end, reordered to above it
    SELECT m.event_nid, m.topological_ordering, m.stream_ordering
    FROM {room} r
    CROSS JOIN LATERAL reordered_across(r.room_nid, {upper}::bigint[], {forwards},
        {rows_max}::bigint) AS m
    WHERE r.moves > ({upper}::bigint[])[2]
),
left_out AS MATERIALIZED (  -- events that belong below the lower end, reordered to above it
    SELECT m.event_nid, m.topological_ordering, m.levels
    FROM {room} r
    CROSS JOIN LATERAL reordered_across(r.room_nid, {lower}::bigint[], {forwards},
        {rows_max}::bigint) AS m
    WHERE r.moves > ({lower}::bigint[])[2]
),
"""

PART_OR_BROUGHT: Final[LiteralString] = """
    OR e.event_nid IN (SELECT event_nid FROM brought)
"""

PART_NOT_LEFT_OUT: Final[LiteralString] = """
    AND e.event_nid NOT IN (SELECT event_nid FROM left_out)
"""

TEMPLATE_NOT_LEFT_OUT_LIVE: Final[LiteralString] = """
    AND e.event_nid NOT IN (SELECT event_nid FROM left_out WHERE levels & {behind}::bigint <> 0)
"""

PART_LEFT_OUT: Final[LiteralString] = """
    (SELECT array_agg(topological_ordering ORDER BY event_nid) FROM left_out)
        AS left_out_topological,
    (SELECT array_agg(levels ORDER BY event_nid) FROM left_out) AS left_out_levels
"""

PART_NONE_LEFT_OUT: Final[LiteralString] = """
    NULL::bigint[] AS left_out_topological, NULL::bigint[] AS left_out_levels
"""
