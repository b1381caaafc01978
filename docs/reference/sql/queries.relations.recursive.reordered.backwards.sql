-- Sent by storage.queries.relations.relations. Parameters: $1 event_id text, $2 in_room text, $3
-- user_id text, $4 ignored text[], $5 rel_type text, $6 event_type text, $7 rows_max bigint, $8
-- levels int, $9 upper bigint, $10 upper_stream bigint, $11 upper_live bigint, $12 lower bigint,
-- $13 lower_stream bigint, $14 lower_live bigint, $15 above bigint, $16 above_stream bigint, $17
-- page_max bigint, $18 upper_numbers bigint[], $19 lower_numbers bigint[], $20 moves_max bigint,
-- $21 behind bigint.

WITH RECURSIVE
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $3::text),
        0) AS principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE($4::text[], ARRAY(
            -- clients can store anything there, also the one character that jsonb cannot have
            SELECT jsonb_path_query(replace(convert_from(d.content, 'UTF8'), '\u0000', '\ufffd')::jsonb,
                '$.ignored_users.keyvalue().key', silent => true) #>> ARRAY[]::text[]
            FROM principals p
            CROSS JOIN event_types t
            JOIN account_data d ON d.principal_nid = p.principal_nid AND d.room_nid = 0
                AND d.type_nid = t.type_nid
            WHERE p.name = $3::text AND t.type = 'm.ignored_user_list'
        )))) AS ignored
),
origin AS MATERIALIZED (
    SELECT e.event_nid, relation_key(e.event_id) AS key, e.room_nid, r.room_id, r.room_version,
        r.moves, reader.ignored,
        (SELECT type_nid FROM event_types WHERE type = $5::text) AS wanted_rel_type_nid,
        (SELECT type_nid FROM event_types WHERE type = $6::text) AS wanted_type_nid, v.*
    FROM reader
    CROSS JOIN events e
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS v
    WHERE e.event_id = $1::text
        AND ($2::text IS NULL OR r.room_id = $2::text)
        AND user_sees(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences, v.shared_before, v.reader_nid, v.unread)
),
-- level by level, not through hidden events. An event relates to one other event: the only cycles
-- are those by the origin
walk AS (
    SELECT r.event_nid, r.key, 0 AS level, true AS shown
    FROM origin r
    UNION ALL
    SELECT e.event_nid, e.key, w.level + 1, e.shown
    FROM walk w
    CROSS JOIN origin r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, relation_key(e.event_id) AS key, (user_sees_relation(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread, r.ignored)
            AND (was_there(e, r.joined_since, r.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, r.reader_nid, r.unread))) AS shown
        FROM events e
        WHERE e.relates_to = w.key AND e.room_nid + 0 = r.room_nid AND NOT e.outlier
            AND e.event_nid <> r.event_nid
            AND ($5::text IS NULL OR e.rel_type_nid = r.wanted_rel_type_nid)
            AND ($6::text IS NULL OR e.type_nid = r.wanted_type_nid)
        OFFSET 0
    ) AS e
    WHERE w.shown AND w.level < $8::int
),
found AS (  -- stops the walk once it has read that many rows
    SELECT event_nid, level, shown
    FROM walk
    LIMIT $7::bigint
),
brought AS MATERIALIZED (  -- events that belong below the upper end, reordered to above it
    SELECT m.event_nid, m.topological_ordering, m.stream_ordering
    FROM origin r
    CROSS JOIN LATERAL reordered_across(r.room_nid, $18::bigint[], false, $20::bigint) AS m
    WHERE r.moves > ($18::bigint[])[2]
),
left_out AS MATERIALIZED (  -- events that belong below the lower end, reordered to above it
    SELECT m.event_nid, m.topological_ordering, m.levels
    FROM origin r
    CROSS JOIN LATERAL reordered_across(r.room_nid, $19::bigint[], false, $20::bigint) AS m
    WHERE r.moves > ($19::bigint[])[2]
),
page AS MATERIALIZED (
    SELECT
        e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth, e.redacted_by,
        e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding, e.json
    FROM found f
    JOIN events e USING (event_nid)
    WHERE f.shown AND f.level > 0
        AND ((e.topological_ordering, e.stream_ordering) <= ($9::bigint, $10::bigint) OR e.event_nid IN (SELECT event_nid FROM brought))
        AND (e.backfilled OR e.stream_ordering <= $11::bigint)
        AND (
            (e.topological_ordering, e.stream_ordering) > ($12::bigint, $13::bigint) AND e.event_nid NOT IN (SELECT event_nid FROM left_out)
            OR (
                NOT e.backfilled AND e.stream_ordering > $14::bigint
                    AND (e.topological_ordering, e.stream_ordering) > ($15::bigint, $16::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out WHERE levels & $21::bigint <> 0)
            )
        )
    ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $17::bigint + 1
)
SELECT
    r.moves, CASE WHEN false THEN
        (SELECT array_agg(topological_ordering ORDER BY event_nid) FROM left_out)
    END AS left_out_topological, CASE WHEN false THEN
        (SELECT array_agg(levels ORDER BY event_nid) FROM left_out)
    END AS left_out_levels, page.event_nid, page.event_id, r.room_id, r.room_version,
    page.stream_ordering, page.topological_ordering,
    claimed_depth(page.depth, page.topological_ordering) AS depth,
    CASE WHEN page.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = page.redacted_by) END AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding,
    page.json
FROM origin r
LEFT JOIN page ON true
ORDER BY page.topological_ordering DESC, page.stream_ordering DESC
