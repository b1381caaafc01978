"""The statements of `storage.queries.relations`, for tokens across whose places events have moved since they were made (`storage.queries.pagination.reordering`).

They give the same where nothing has, and are asked only where something has (see `storage.queries.pagination.messages_reordered`).
"""

from typing import Final, LiteralString

SQL_BACKWARDS_MOVED: Final[LiteralString] = """
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
    WHERE e.event_id = $1::text
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
brought AS MATERIALIZED (  -- what belongs below the upper end, and has moved above it
    SELECT m.event_nid, m.topological_ordering, m.stream_ordering
    FROM target t
    CROSS JOIN LATERAL reordered_across(t.room_nid, $13::bigint[], false, $15::bigint) AS m
    WHERE t.moves > ($13::bigint[])[2]
),
left_out AS MATERIALIZED (  -- what belongs below the lower end, likewise
    SELECT m.event_nid, m.topological_ordering, m.levels
    FROM target t
    CROSS JOIN LATERAL reordered_across(t.room_nid, $14::bigint[], false, $15::bigint) AS m
    WHERE t.moves > ($14::bigint[])[2]
),
stretch AS MATERIALIZED (  -- each of what has moved is a stretch of its own
    SELECT CASE WHEN $11::bigint = 9223372036854775807 THEN $9::bigint
        ELSE $16::bigint END AS lower, 0::bigint AS lower_stream,
        $6::bigint AS upper, $7::bigint AS upper_stream
    UNION ALL
    SELECT topological_ordering, stream_ordering, topological_ordering, stream_ordering FROM brought
),
page AS MATERIALIZED (  -- of each type as many as asked for, and one more
    SELECT e.*
    FROM target t
    CROSS JOIN kind
    CROSS JOIN stretch AS s
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth,
            e.redacted_by, e.rejected, e.soft_failed,
            e.outlier, e.redacted_form, e.encoding, e.json
        FROM events e
        WHERE e.relates_to = t.key AND e.rel_type_nid = kind.rel_type_nid
            AND e.room_nid = t.room_nid AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= (s.upper, s.upper_stream)
            AND (e.topological_ordering, e.stream_ordering) >= (s.lower, s.lower_stream)
            AND (e.backfilled OR e.stream_ordering <= $8::bigint)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($9::bigint, $10::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $11::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($16::bigint, $17::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out
                        WHERE levels & $18::bigint <> 0)
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

SQL_FORWARDS_MOVED: Final[LiteralString] = """
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
    WHERE e.event_id = $1::text
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
brought AS MATERIALIZED (  -- what belongs below the upper end, and has moved above it
    SELECT m.event_nid, m.topological_ordering, m.stream_ordering
    FROM target t
    CROSS JOIN LATERAL reordered_across(t.room_nid, $13::bigint[], true, $15::bigint) AS m
    WHERE t.moves > ($13::bigint[])[2]
),
left_out AS MATERIALIZED (  -- what belongs below the lower end, likewise
    SELECT m.event_nid, m.topological_ordering, m.levels
    FROM target t
    CROSS JOIN LATERAL reordered_across(t.room_nid, $14::bigint[], true, $15::bigint) AS m
    WHERE t.moves > ($14::bigint[])[2]
),
stretch AS MATERIALIZED (  -- each of what has moved is a stretch of its own
    SELECT CASE WHEN $11::bigint = 9223372036854775807 THEN $9::bigint
        ELSE $16::bigint END AS lower, 0::bigint AS lower_stream,
        $6::bigint AS upper, $7::bigint AS upper_stream
    UNION ALL
    SELECT topological_ordering, stream_ordering, topological_ordering, stream_ordering FROM brought
),
page AS MATERIALIZED (  -- of each type as many as asked for, and one more
    SELECT e.*
    FROM target t
    CROSS JOIN kind
    CROSS JOIN stretch AS s
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth,
            e.redacted_by, e.rejected, e.soft_failed,
            e.outlier, e.redacted_form, e.encoding, e.json
        FROM events e
        WHERE e.relates_to = t.key AND e.rel_type_nid = kind.rel_type_nid
            AND e.room_nid = t.room_nid AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= (s.upper, s.upper_stream)
            AND (e.topological_ordering, e.stream_ordering) >= (s.lower, s.lower_stream)
            AND (e.backfilled OR e.stream_ordering <= $8::bigint)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($9::bigint, $10::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $11::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($16::bigint, $17::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out
                        WHERE levels & $18::bigint <> 0)
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
SELECT CASE WHEN t.moves > 0 THEN (
        SELECT t.moves || COALESCE(array_agg(topological_ordering
            ORDER BY event_nid) || array_agg(levels ORDER BY event_nid), '{}')
        FROM left_out
    ) END AS moved,
    page.event_nid, page.event_id, t.room_id, t.room_version, page.stream_ordering,
        page.topological_ordering, page.depth,
    (SELECT b.event_id FROM events b WHERE b.event_nid = page.redacted_by) AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding, page.json
FROM target t
LEFT JOIN page ON true
ORDER BY page.topological_ordering, page.stream_ordering
"""

SQL_RECURSIVE_MOVED: Final[LiteralString] = """
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
    WHERE e.event_id = $1::text
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
brought AS MATERIALIZED (  -- what belongs below the upper end, and has moved above it
    SELECT m.event_nid, m.topological_ordering, m.stream_ordering
    FROM target t
    CROSS JOIN LATERAL reordered_across(t.room_nid, $16::bigint[], $13::bigint > 0,
        $18::bigint) AS m
    WHERE t.moves > ($16::bigint[])[2]
),
left_out AS MATERIALIZED (  -- what belongs below the lower end, likewise
    SELECT m.event_nid, m.topological_ordering, m.levels
    FROM target t
    CROSS JOIN LATERAL reordered_across(t.room_nid, $17::bigint[], $13::bigint > 0,
        $18::bigint) AS m
    WHERE t.moves > ($17::bigint[])[2]
),
page AS MATERIALIZED (
    SELECT e.event_nid, e.topological_ordering, e.stream_ordering
    FROM found f
    JOIN events e USING (event_nid)
    WHERE f.shown AND f.level > 0
        AND ((e.topological_ordering, e.stream_ordering) <= ($6::bigint, $7::bigint)
            OR e.event_nid IN (SELECT event_nid FROM brought))
        AND (e.backfilled OR e.stream_ordering <= $8::bigint)
        AND (
            (e.topological_ordering, e.stream_ordering) > ($9::bigint, $10::bigint)
                AND e.event_nid NOT IN (SELECT event_nid FROM left_out)
            OR (
                NOT e.backfilled AND e.stream_ordering > $11::bigint
                    AND (e.topological_ordering, e.stream_ordering) > ($19::bigint, $20::bigint)
                AND e.event_nid NOT IN (SELECT event_nid FROM left_out
                    WHERE levels & $21::bigint <> 0)
            )
        )
    ORDER BY e.topological_ordering * $13::bigint, e.stream_ordering * $13::bigint
    LIMIT $12::bigint + 1
)
SELECT CASE WHEN t.moves > 0 THEN (
        SELECT t.moves || COALESCE(array_agg(topological_ordering
            ORDER BY event_nid) || array_agg(levels ORDER BY event_nid), '{}')
        FROM left_out
    ) END AS moved, s.*
FROM target t
LEFT JOIN page ON true
LEFT JOIN stored_events s ON s.event_nid = page.event_nid
ORDER BY page.topological_ordering * $13::bigint, page.stream_ordering * $13::bigint
"""
