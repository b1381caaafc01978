-- Sent by storage.queries.relations.relations. Parameters: $1 event_id text, $2 in_room text, $3
-- user_id text, $4 ignored text[], $5 rel_type text, $6 event_type text, $7 upper bigint, $8
-- upper_stream bigint, $9 upper_live bigint, $10 lower bigint, $11 lower_stream bigint, $12
-- lower_live bigint, $13 above bigint, $14 above_stream bigint, $15 page_max bigint, $16 moves
-- bigint.

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
    WHERE e.event_id = $1::text AND r.moves <= $16::bigint
        AND ($2::text IS NULL OR r.room_id = $2::text)
        AND user_sees(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences, v.shared_before, v.reader_nid, v.unread)
),
found AS (  -- the types of relations to it: the index leads from each to the next one
    SELECT (
        SELECT e.rel_type_nid FROM events e WHERE e.relates_to = r.key AND NOT e.outlier
            ORDER BY e.rel_type_nid LIMIT 1
    ) AS rel_type_nid, r.key
    FROM origin r
    WHERE $5::text IS NULL
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
visible_range AS MATERIALIZED (  -- the whole order, for each type
    SELECT r.*, kind.rel_type_nid, 0::bigint AS lowest, 9223372036854775807 AS highest
    FROM origin r
    CROSS JOIN (
        SELECT rel_type_nid FROM found
        UNION ALL
        SELECT wanted_rel_type_nid FROM origin
    ) AS kind
    WHERE kind.rel_type_nid IS NOT NULL
),
page_range AS (
    SELECT s.*, GREATEST(CASE WHEN $12::bigint = 9223372036854775807 THEN $10::bigint ELSE $13::bigint END, s.lowest) AS lower, 0::bigint AS lower_stream,
        LEAST($7::bigint, s.highest) AS upper, CASE
        WHEN s.highest < $7::bigint THEN 9223372036854775807 ELSE $8::bigint END AS upper_stream
    FROM visible_range s
),
page AS MATERIALIZED (
    SELECT e.*
    FROM page_range AS r
    CROSS JOIN LATERAL (
        SELECT
            e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth, e.redacted_by,
            e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding, e.json
        FROM events e
        WHERE e.relates_to = r.key AND e.rel_type_nid = r.rel_type_nid AND e.room_nid + 0 = r.room_nid
            AND ($6::text IS NULL OR e.type_nid = r.wanted_type_nid)
            AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= (r.upper, r.upper_stream)
            AND (e.topological_ordering, e.stream_ordering) >= (r.lower, r.lower_stream)
            AND (e.backfilled OR e.stream_ordering <= $9::bigint)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($10::bigint, $11::bigint)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $12::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($13::bigint, $14::bigint)
                )
            )
            AND user_sees_relation(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread, r.ignored)
                AND (was_there(e, r.joined_since, r.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, r.reader_nid, r.unread))
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $15::bigint + 1
    ) AS e
    ORDER BY  e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $15::bigint + 1
)
SELECT
    r.moves, NULL::bigint[] AS left_out_topological, NULL::bigint[] AS left_out_levels, page.event_nid, page.event_id, r.room_id, r.room_version,
    page.stream_ordering, page.topological_ordering,
    claimed_depth(page.depth, page.topological_ordering) AS depth,
    CASE WHEN page.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = page.redacted_by) END AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding,
    page.json
FROM origin r
LEFT JOIN page ON true
ORDER BY page.topological_ordering DESC, page.stream_ordering DESC
