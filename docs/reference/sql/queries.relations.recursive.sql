-- Sent by storage.queries.relations._statements. Parameters: $1 event_id text, $2 user_id text, $3
-- ignored text[], $4 rel_type text, $5 event_type text, $6 upper bigint, $7 upper_stream bigint, $8
-- upper_live bigint, $9 lower bigint, $10 lower_stream bigint, $11 lower_live bigint, $12 page_max
-- bigint, $13 sign bigint, $14 rows_max bigint, $15 levels int, $16 above bigint, $17 above_stream
-- bigint, $18 moves bigint, $19 room_id text.

WITH RECURSIVE
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE($3::text[], ARRAY(
            -- clients can store anything there, also the one character that jsonb cannot have
            SELECT jsonb_path_query(replace(convert_from(d.content, 'UTF8'), '\u0000', '\ufffd')::jsonb,
                '$.ignored_users.keyvalue().key', silent => true) #>> ARRAY[]::text[]
            FROM principals p
            CROSS JOIN event_types t
            JOIN account_data d ON d.principal_nid = p.principal_nid AND d.room_nid = 0
                AND d.type_nid = t.type_nid
            WHERE p.name = $2::text AND t.type = 'm.ignored_user_list'
        )))) AS ignored,
        (SELECT type_nid FROM event_types WHERE type = $4::text) AS rel_type_nid,
        (SELECT type_nid FROM event_types WHERE type = $5::text) AS type_nid
),
target AS MATERIALIZED (
    SELECT e.event_nid, relation_key(e.event_id) AS key, e.room_nid, r.moves, reader.ignored,
        reader.rel_type_nid, reader.type_nid, v.*
    FROM reader
    CROSS JOIN events e
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS v
    WHERE e.event_id = $1::text AND r.moves <= $18::bigint
        AND ($19::text IS NULL OR r.room_id = $19::text)
        AND user_sees(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences, v.shared_before, v.reader_nid, v.unread)
),
-- level by level, not through hidden events. An event relates to one other event: the only cycles
-- are those by the target
walk AS (
    SELECT r.event_nid, r.key, 0 AS level, true AS shown
    FROM target r
    UNION ALL
    SELECT e.event_nid, e.key, w.level + 1, e.shown
    FROM walk w
    CROSS JOIN target r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, relation_key(e.event_id) AS key, (user_sees_relation(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread, r.ignored)
            AND (was_there(e, r.joined_since, r.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, r.reader_nid, r.unread))) AS shown
        FROM events e
        WHERE e.relates_to = w.key AND e.room_nid + 0 = r.room_nid AND NOT e.outlier
            AND e.event_nid <> r.event_nid
            AND ($4::text IS NULL OR e.rel_type_nid = r.rel_type_nid)
            AND ($5::text IS NULL OR e.type_nid = r.type_nid)
        OFFSET 0
    ) AS e
    WHERE w.shown AND w.level < $15::int
),
found AS (  -- stops the walk once it has read that many rows
    SELECT event_nid, level, shown
    FROM walk
    LIMIT $14::bigint
),
page AS MATERIALIZED (
    SELECT e.event_nid, e.topological_ordering, e.stream_ordering
    FROM found f
    JOIN events e USING (event_nid)
    WHERE f.shown AND f.level > 0
        AND ((e.topological_ordering, e.stream_ordering) <= ($6::bigint, $7::bigint) )
        AND (e.backfilled OR e.stream_ordering <= $8::bigint)
        AND (
            (e.topological_ordering, e.stream_ordering) > ($9::bigint, $10::bigint)
            OR (
                NOT e.backfilled AND e.stream_ordering > $11::bigint
                    AND (e.topological_ordering, e.stream_ordering) > ($16::bigint, $17::bigint)
            )
        )
    ORDER BY e.topological_ordering * $13::bigint, e.stream_ordering * $13::bigint
    LIMIT $12::bigint + 1
)
SELECT r.moves, NULL::bigint[] AS left_out_topological, NULL::bigint[] AS left_out_levels, s.*
FROM target r
LEFT JOIN page ON true
LEFT JOIN stored_events s ON s.event_nid = page.event_nid
ORDER BY page.topological_ordering * $13::bigint, page.stream_ordering * $13::bigint
