"""SQL parts of a sync: the summaries of joined rooms. Client-server API, "Syncing"."""

from typing import Final, LiteralString

from storage.database.sql_template import fill

TEMPLATE_IS_NAMED: Final[LiteralString] = """
EXISTS (
            SELECT
            FROM (VALUES {keys}) AS k (state_key_nid)
            JOIN events e ON e.event_nid = COALESCE((
                SELECT COALESCE(d.prev_event_nid, 0)
                FROM state_deltas d
                WHERE d.room_nid = r.room_nid AND d.state_key_nid = k.state_key_nid
                    AND d.stream_ordering > r.upper
                ORDER BY d.stream_ordering
                LIMIT 1
            ), (SELECT c.event_nid FROM current_state c
                WHERE c.room_nid = r.room_nid AND c.state_key_nid = k.state_key_nid))
            WHERE e.redacted_by IS NULL AND NOT e.redacted_form AND e.describes_room
        )
"""
"""Whether the room `r` has one of these names at `r.upper`."""

TEMPLATE_DUE_SUMMARIES: Final[LiteralString] = """
later AS (  -- members that changed after the position of the request
    SELECT DISTINCT ON (d.room_nid, d.state_key_nid) d.room_nid, d.state_key_nid,
        COALESCE(e.membership, 0) AS membership, COALESCE(c.membership, 0) AS membership_now
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.upper
    LEFT JOIN events e ON e.event_nid = d.prev_event_nid
    LEFT JOIN current_state c ON c.room_nid = d.room_nid AND c.state_key_nid = d.state_key_nid
    WHERE r.is_joined
    ORDER BY d.room_nid, d.state_key_nid, d.stream_ordering
),
due AS MATERIALIZED (  -- joined rooms with a summary that may have changed: members, name, alias
    SELECT r.room_nid, i.joined_count, i.invited_count, CASE WHEN NOT {is_named} THEN
        COALESCE(NULLIF(heroes_of(r.room_nid, r.upper, '{4,5}', $17::text), '{}'),
            heroes_of(r.room_nid, r.upper, '{1,2}', $17::text))
    END AS heroes
    FROM room r
    JOIN rooms i USING (room_nid)
    WHERE r.is_joined AND (r.whole OR EXISTS (
        SELECT
        FROM state_deltas d
        JOIN state_keys k USING (state_key_nid)
        WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
            AND d.stream_ordering <= r.upper
            AND (k.type_nid = 2 OR k.state_key_nid IN (9, 11))
    ))
),
"""
PART_DUE_SUMMARIES: Final[LiteralString] = fill(
    TEMPLATE_DUE_SUMMARIES,
    is_named=fill(TEMPLATE_IS_NAMED, keys="(9), (11)"),
)
"""The CTE `due`, made from `room`: rooms with a summary that may have changed, and its values."""

PART_SUMMARIES: Final[LiteralString] = """
SELECT 'summary', d.room_nid, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL,
    d.joined_count + COALESCE((SELECT sum((l.membership = 5)::int - (l.membership_now = 5)::int)
        FROM later l WHERE l.room_nid = d.room_nid), 0)::int,
    d.invited_count + COALESCE((SELECT sum((l.membership = 4)::int - (l.membership_now = 4)::int)
        FROM later l WHERE l.room_nid = d.room_nid), 0)::int,
    d.heroes
FROM due d
"""
"""The rows of kind "summary". $17 is the user."""
