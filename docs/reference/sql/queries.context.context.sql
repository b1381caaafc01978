-- Sent by storage.queries.context.context. Parameters: $1 event_id text, $2 user_id text, $3
-- before_max bigint, $4 after_max bigint, $5 ignored text[], $6 types text[], $7 not_types text[],
-- $8 senders text[], $9 not_senders text[], $10 contains_url boolean, $11 room_id text.

WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE($5::text[], ARRAY(
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
target AS MATERIALIZED (
    SELECT e.event_nid, e.room_nid, e.topological_ordering, e.stream_ordering, reader.*,
        NOT was_there(e, v.joined_since, v.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, v.reader_nid, v.unread) AS withheld, f.*
    FROM reader
    CROSS JOIN filter_of($6::text[], $7::text[], $8::text[], $9::text[], $10::boolean) AS f
    CROSS JOIN events e
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS v
    WHERE e.event_id = $1::text AND ($11::text IS NULL
            OR e.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $11::text))
        AND user_sees(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences, v.shared_before, v.reader_nid, v.unread)
),
-- the topological ranges of the reader's audiences: the hidden events between them are not read
visible_range AS MATERIALIZED (
    SELECT t.room_nid, t.topological_ordering, t.stream_ordering, t.ignored, t.types, t.not_types,
        t.senders, t.not_senders, t.contains_url, v.*
    FROM target t
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL topological_ranges_of(
        t.room_nid, t.principal_nid, r.out_of_range, t.topological_ordering, $3::bigint, $4::bigint
    ) AS v
),
range_before AS (
    SELECT v.*, v.lowest AS lower, 0::bigint AS lower_stream,
        LEAST(v.topological_ordering, v.highest) AS upper,
        CASE WHEN v.highest < v.topological_ordering THEN 9223372036854775807
            ELSE v.stream_ordering - 1 END AS upper_stream
    FROM visible_range v
),
range_after AS (
    SELECT v.*, GREATEST(v.topological_ordering, v.lowest) AS lower,
        CASE WHEN v.lowest > v.topological_ordering THEN 0 ELSE v.stream_ordering + 1
            END AS lower_stream, v.highest AS upper, 9223372036854775807 AS upper_stream
    FROM visible_range v
),
before AS (
    SELECT e.*
    FROM (SELECT * FROM range_before ORDER BY upper DESC) AS r
    CROSS JOIN LATERAL (
        SELECT
            e.event_nid, e.topological_ordering, e.stream_ordering, NOT was_there(e, r.joined_since, r.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld
        FROM events e
        WHERE e.room_nid = r.room_nid
            AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= (r.upper, r.upper_stream)
            AND (e.topological_ordering, e.stream_ordering) >= (r.lower, r.lower_stream)
            AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread)
            AND not_ignored(e, r.ignored)
            AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $3::bigint
    ) AS e
    ORDER BY r.upper DESC, e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $3::bigint
),
after AS (
    SELECT e.*
    FROM (SELECT * FROM range_after ORDER BY lower) AS r
    CROSS JOIN LATERAL (
        SELECT
            e.event_nid, e.topological_ordering, e.stream_ordering, NOT was_there(e, r.joined_since, r.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld
        FROM events e
        WHERE e.room_nid = r.room_nid
            AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= (r.upper, r.upper_stream)
            AND (e.topological_ordering, e.stream_ordering) >= (r.lower, r.lower_stream)
            AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread)
            AND not_ignored(e, r.ignored)
            AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
        ORDER BY e.topological_ordering ASC, e.stream_ordering ASC
        LIMIT $4::bigint
    ) AS e
    ORDER BY r.lower, e.topological_ordering ASC, e.stream_ordering ASC
    LIMIT $4::bigint
),
chosen AS (
    SELECT event_nid, withheld, -1 AS side FROM before
    UNION ALL
    SELECT event_nid, withheld, 0 FROM target
    UNION ALL
    SELECT event_nid, withheld, 1 FROM after
)
SELECT chosen.side, (SELECT r.moves FROM target t JOIN rooms r USING (room_nid)) AS moves,
    chosen.withheld, s.*
FROM chosen
JOIN stored_events s USING (event_nid)
ORDER BY s.topological_ordering, s.stream_ordering
