"""The statements of `storage.queries.messages`, for tokens across whose places events have moved since they were made (`storage.queries.pagination.reordering`).

They give the same where nothing has; what they do besides takes a tenth of the time of a page, so they are asked only where they are needed.
"""

from typing import Final, LiteralString

SQL_BACKWARDS_MOVED: Final[LiteralString] = """
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
    WHERE r.room_id = $1::text
),
newer AS MATERIALIZED (  -- what has arrived since a timeline, where one bounds the stretch
    SELECT e.topological_ordering
    FROM room r
    JOIN events e ON e.room_nid = r.room_nid AND e.stream_ordering > $8::bigint
    WHERE $8::bigint < 9223372036854775807 AND $19::bigint = 0 AND NOT e.outlier
        AND NOT e.backfilled
),
-- where in the order the reader's audiences lie: what is hidden between is not looked at
sight AS MATERIALIZED (
    SELECT r.room_nid, r.ignored, f.*, stretch.*
    FROM room r
    CROSS JOIN filter_of($11::text[], $12::text[], $13::text[], $14::text[], $15::boolean) AS f
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        $3::bigint, $9::bigint + 1, 0) AS stretch
),
brought AS MATERIALIZED (  -- what belongs below `from`, and has moved above it
    SELECT m.event_nid, m.topological_ordering, m.stream_ordering
    FROM room r
    CROSS JOIN LATERAL reordered_across(r.room_nid, $16::bigint[], false, $18::bigint) AS m
    WHERE r.moves > ($16::bigint[])[2]
),
left_out AS MATERIALIZED (  -- what belongs below `to`, likewise
    SELECT m.event_nid, m.topological_ordering, m.levels
    FROM room r
    CROSS JOIN LATERAL reordered_across(r.room_nid, $17::bigint[], false, $18::bigint) AS m
    WHERE r.moves > ($17::bigint[])[2]
),
stretch AS (  -- each of what has moved is a stretch of its own
    SELECT s.*, s.lowest AS lower, 0::bigint AS lower_stream, LEAST($3::bigint, s.highest) AS upper,
        CASE WHEN s.highest < $3::bigint THEN 9223372036854775807
            ELSE $4::bigint END AS upper_stream
    FROM sight s
    UNION ALL
    SELECT s.*, m.topological_ordering, m.stream_ordering, m.topological_ordering, m.stream_ordering
    FROM brought m
    CROSS JOIN (SELECT * FROM sight LIMIT 1) AS s
),
-- where to stop at the latest: what lies before `to`, beside a timeline, ends at the oldest event
-- of that
lowest AS MATERIALIZED (
    SELECT CASE WHEN $8::bigint = 9223372036854775807 THEN $6::bigint
        WHEN $19::bigint > 0 THEN $19::bigint ELSE (
        SELECT LEAST($6::bigint, COALESCE(min(topological_ordering) - 1, $6::bigint)) FROM newer
    ) END AS topological_ordering
),
-- before `from`, after `to`; one more than asked for, to know whether there are more
page AS MATERIALIZED (
    SELECT e.*
    FROM (SELECT * FROM stretch ORDER BY upper DESC) AS r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth,
            e.redacted_by, e.rejected, e.soft_failed,
            e.outlier, e.redacted_form, e.encoding, e.json,
            NOT was_there(e, r.joined_since, r.joined_audiences)
                AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= (r.upper, r.upper_stream)
            AND (e.backfilled OR e.stream_ordering <= $5::bigint)
            AND (e.topological_ordering,
                e.stream_ordering) >= (GREATEST((SELECT topological_ordering FROM lowest), r.lower),
                    r.lower_stream)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($6::bigint, $7::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $8::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($19::bigint, $20::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out
                        WHERE levels & $21::bigint <> 0)
                )
            )
            AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences,
                r.shared_before, r.reader_nid, r.unread)
            AND not_ignored(e, r.ignored)
            AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $9::bigint + 1
    ) AS e
    ORDER BY r.upper DESC, e.topological_ordering DESC, e.stream_ordering DESC
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
        AND ((c.topological_ordering, c.stream_ordering) <= ($3::bigint, $4::bigint)
            OR c.event_nid IN (SELECT event_nid FROM brought))
        -- the gap at which a timeline begins, too
        AND (c.backfilled OR c.stream_ordering <= $5::bigint OR $3::bigint < 9223372036854775807)
        AND (
            (c.topological_ordering, c.stream_ordering) > ($6::bigint, $7::bigint)
                AND c.event_nid NOT IN (SELECT event_nid FROM left_out)
            OR (
                NOT c.backfilled AND c.stream_ordering > $8::bigint
                    AND (c.topological_ordering, c.stream_ordering) > ($19::bigint, $20::bigint)
                AND c.event_nid NOT IN (SELECT event_nid FROM left_out
                    WHERE levels & $21::bigint <> 0)
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

SQL_FORWARDS_MOVED: Final[LiteralString] = """
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
    WHERE r.room_id = $1::text
),
newer AS MATERIALIZED (  -- what has arrived since a timeline, where one bounds the stretch
    SELECT e.topological_ordering
    FROM room r
    JOIN events e ON e.room_nid = r.room_nid AND e.stream_ordering > $5::bigint
    WHERE $5::bigint < 9223372036854775807 AND $19::bigint = 0 AND NOT e.outlier
        AND NOT e.backfilled
),
-- where to begin: of what lies after `from`, beside a timeline, the oldest event
lowest AS MATERIALIZED (
    SELECT CASE WHEN $5::bigint = 9223372036854775807 THEN $3::bigint
        WHEN $19::bigint > 0 THEN $19::bigint ELSE (
        SELECT LEAST($3::bigint, COALESCE(min(topological_ordering) - 1, $3::bigint)) FROM newer
    ) END AS topological_ordering
),
-- where in the order the reader's audiences lie: what is hidden between is not looked at
sight AS MATERIALIZED (
    SELECT r.room_nid, r.ignored, f.*, stretch.*
    FROM room r
    CROSS JOIN filter_of($11::text[], $12::text[], $13::text[], $14::text[], $15::boolean) AS f
    CROSS JOIN lowest
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        lowest.topological_ordering, 0, $9::bigint + 1)
        AS stretch
),
brought AS MATERIALIZED (  -- what belongs below `to`, and has moved above it
    SELECT m.event_nid, m.topological_ordering, m.stream_ordering
    FROM room r
    CROSS JOIN LATERAL reordered_across(r.room_nid, $17::bigint[], true, $18::bigint) AS m
    WHERE r.moves > ($17::bigint[])[2]
),
left_out AS MATERIALIZED (  -- what belongs below `from`, likewise
    SELECT m.event_nid, m.topological_ordering, m.levels
    FROM room r
    CROSS JOIN LATERAL reordered_across(r.room_nid, $16::bigint[], true, $18::bigint) AS m
    WHERE r.moves > ($16::bigint[])[2]
),
stretch AS (  -- each of what has moved is a stretch of its own
    SELECT s.*, s.lowest AS lower, 0::bigint AS lower_stream, LEAST($6::bigint, s.highest) AS upper,
        CASE WHEN s.highest < $6::bigint THEN 9223372036854775807
            ELSE $7::bigint END AS upper_stream
    FROM sight s
    UNION ALL
    SELECT s.*, m.topological_ordering, m.stream_ordering, m.topological_ordering, m.stream_ordering
    FROM brought m
    CROSS JOIN (SELECT * FROM sight LIMIT 1) AS s
),
-- after `from`, before `to`; one more than asked for, to know whether there are more
page AS MATERIALIZED (
    SELECT e.*
    FROM (SELECT * FROM stretch ORDER BY lower) AS r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth,
            e.redacted_by, e.rejected, e.soft_failed,
            e.outlier, e.redacted_form, e.encoding, e.json,
            NOT was_there(e, r.joined_since, r.joined_audiences)
                AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier
            AND (e.topological_ordering,
                e.stream_ordering) >= (GREATEST((SELECT topological_ordering FROM lowest), r.lower),
                    r.lower_stream)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($3::bigint, $4::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $5::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($19::bigint, $20::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out
                        WHERE levels & $21::bigint <> 0)
                )
            )
            AND (e.topological_ordering, e.stream_ordering) <= (r.upper, r.upper_stream)
            AND (e.backfilled OR e.stream_ordering <= $8::bigint)
            AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences,
                r.shared_before, r.reader_nid, r.unread)
            AND not_ignored(e, r.ignored)
            AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
        ORDER BY e.topological_ordering, e.stream_ordering
        LIMIT $9::bigint + 1
    ) AS e
    ORDER BY r.lower, e.topological_ordering, e.stream_ordering
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
                AND c.event_nid NOT IN (SELECT event_nid FROM left_out)
            OR (
                NOT c.backfilled AND c.stream_ordering > $5::bigint
                    AND (c.topological_ordering, c.stream_ordering) > ($19::bigint, $20::bigint)
                AND c.event_nid NOT IN (SELECT event_nid FROM left_out
                    WHERE levels & $21::bigint <> 0)
            )
        )
        AND ((c.topological_ordering, c.stream_ordering) <= ($6::bigint, $7::bigint)
            OR c.event_nid IN (SELECT event_nid FROM brought))
        AND (c.backfilled OR c.stream_ordering <= $8::bigint)
        AND c.topological_ordering <= COALESCE(covered.topological_ordering, 9223372036854775807)
)
SELECT gap.ids AS gap_ids, gap.topological AS gap_topological, gap.stream AS gap_stream,
    CASE WHEN room.moves > 0 THEN (
        SELECT room.moves || COALESCE(array_agg(topological_ordering
            ORDER BY event_nid) || array_agg(levels ORDER BY event_nid), '{}')
        FROM left_out
    ) END AS moved, page.withheld,
    page.event_nid, page.event_id, room.room_id, room.room_version, page.stream_ordering,
        page.topological_ordering, page.depth,
    (SELECT b.event_id FROM events b WHERE b.event_nid = page.redacted_by) AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding, page.json
FROM room
CROSS JOIN gap
LEFT JOIN page ON true
ORDER BY page.topological_ordering, page.stream_ordering
"""
