-- Sent by storage.queries.threads._step. Parameters: $1 room_id text, $2 user_id text, $3 ignored
-- text[], $4 below bigint, $5 below_stream bigint, $6 replies_max bigint, $7 threads_max bigint.

WITH
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
        )))) AS ignored
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.out_of_range, reader.*
    FROM reader
    CROSS JOIN rooms r
    WHERE r.room_id = $1::text
),
visible_range AS MATERIALIZED (
    SELECT r.room_nid, r.ignored, s.*, s.lowest AS lower, 0::bigint AS lower_stream,
        LEAST(s.highest, $4::bigint) AS upper, CASE WHEN s.highest < $4::bigint THEN 9223372036854775807
            ELSE $5::bigint - 1 END AS upper_stream
    FROM room r
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        $4::bigint, $6::bigint, 0) AS s
),
reply AS MATERIALIZED (  -- from the index alone, visible or not
    SELECT e.*
    FROM (SELECT * FROM visible_range ORDER BY upper DESC) AS r
    CROSS JOIN LATERAL (
        SELECT
            e.relates_to, e.topological_ordering, e.stream_ordering
        FROM events e
        WHERE e.room_nid = r.room_nid
            AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= (r.upper, r.upper_stream)
            AND (e.topological_ordering, e.stream_ordering) >= (r.lower, r.lower_stream)
            AND e.rel_type_nid = 22 /* REL_THREAD */
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $6::bigint
    ) AS e
    ORDER BY r.upper DESC, e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $6::bigint
),
chunk AS MATERIALIZED (  -- NULL as its end: there are no replies below
    SELECT CASE WHEN count(*) = $6::bigint THEN min(topological_ordering) END AS topological
    FROM reply
),
ending AS MATERIALIZED (
    SELECT c.topological, (SELECT min(y.stream_ordering) FROM reply y
        WHERE y.topological_ordering = c.topological) AS stream
    FROM chunk c
),
reach AS MATERIALIZED (  -- a thread may have many replies after the reader left
    SELECT max(highest) AS highest FROM visible_range
),
thread AS (
    SELECT last.*
    FROM (SELECT DISTINCT relates_to FROM reply) AS t
    CROSS JOIN reach
    CROSS JOIN (SELECT * FROM visible_range LIMIT 1) AS v
    CROSS JOIN LATERAL (
        SELECT e.topological_ordering, e.stream_ordering, e.event_id, e.json
        FROM events e
        WHERE e.relates_to = t.relates_to AND e.rel_type_nid = (SELECT 22 /* REL_THREAD */)
            AND e.room_nid + 0 = v.room_nid
            AND NOT e.outlier AND e.topological_ordering <= reach.highest
            AND user_sees_relation(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences, v.shared_before, v.reader_nid, v.unread, v.ignored)
                AND (was_there(e, v.joined_since, v.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, v.reader_nid, v.unread))
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT 1
    ) AS last
    WHERE (last.topological_ordering, last.stream_ordering) < ($4::bigint, $5::bigint)
        AND (last.topological_ordering, last.stream_ordering)
            >= (SELECT COALESCE(topological, 0), COALESCE(stream, 0) FROM ending)
    ORDER BY last.topological_ordering DESC, last.stream_ordering DESC
    LIMIT $7::bigint
)
SELECT (SELECT count(*) FROM reply) AS replies, n.topological AS ending_topological,
    n.stream AS ending_stream, t.topological_ordering, t.stream_ordering,
    t.event_id, t.json
FROM room r
CROSS JOIN ending n
LEFT JOIN thread t ON true
ORDER BY t.topological_ordering DESC, t.stream_ordering DESC
