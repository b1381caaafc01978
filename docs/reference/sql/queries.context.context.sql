-- Sent by storage.queries.context.context. Parameters: $1 event_id text, $2 user_id text, $3
-- before_max bigint, $4 after_max bigint, $5 ignored text[], $6 types text[], $7 not_types text[],
-- $8 senders text[], $9 not_senders text[], $10 contains_url boolean, $11 room_id text.

WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
),
target AS MATERIALIZED (
    SELECT e.event_nid, e.room_nid, e.topological_ordering, e.stream_ordering, reader.principal_nid,
        NOT was_there(e, v.joined_since, v.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, v.reader_nid, v.unread) AS withheld,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE($5::text[], ARRAY(
            -- clients can store anything there, also the one character that jsonb cannot have
            SELECT jsonb_path_query(replace(convert_from(d.content, 'UTF8'), '\u0000', '\ufffd')::jsonb,
                '$.ignored_users.keyvalue().key', silent => true) #>> ARRAY[]::text[]
            FROM principals p
            CROSS JOIN event_types t
            JOIN account_data d ON d.principal_nid = p.principal_nid AND d.room_nid = 0
                AND d.type_nid = t.type_nid
            WHERE p.name = $2::text AND t.type = 'm.ignored_user_list'
        )))) AS ignored, f.*
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
    SELECT v.*
    FROM target t
    JOIN rooms r USING (room_nid)
    CROSS JOIN LATERAL topological_ranges_of(
        t.room_nid, t.principal_nid, r.out_of_range, t.topological_ordering, $3::bigint, $4::bigint
    ) AS v
),
before AS (
    SELECT e.event_nid, e.withheld
        FROM (SELECT * FROM target CROSS JOIN visible_range v ORDER BY v.highest DESC) AS t
        CROSS JOIN LATERAL (
            SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
                NOT was_there(e, t.joined_since, t.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, t.reader_nid, t.unread) AS withheld
            FROM events e
            WHERE e.room_nid = t.room_nid AND NOT e.outlier
                AND (e.topological_ordering, e.stream_ordering) < (
                    LEAST(t.topological_ordering, t.highest),
                    CASE WHEN t.highest < t.topological_ordering THEN 9223372036854775807
                        ELSE t.stream_ordering END
                )
                AND e.topological_ordering >= t.lowest
                AND user_sees(e, t.joined_since, t.own_audiences, t.shared_audiences, t.world_audiences, t.shared_before, t.reader_nid, t.unread)
                AND not_ignored(e, t.ignored)
                AND is_wanted(e, t.types, t.not_types, t.senders, t.not_senders, t.contains_url)
            ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
            LIMIT $3::bigint
        ) AS e
        ORDER BY t.highest DESC, e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $3::bigint
),
after AS (
    SELECT e.event_nid, e.withheld
        FROM (SELECT * FROM target CROSS JOIN visible_range v ORDER BY v.lowest ASC) AS t
        CROSS JOIN LATERAL (
            SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
                NOT was_there(e, t.joined_since, t.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, t.reader_nid, t.unread) AS withheld
            FROM events e
            WHERE e.room_nid = t.room_nid AND NOT e.outlier
                AND (e.topological_ordering, e.stream_ordering) > (
                    GREATEST(t.topological_ordering, t.lowest),
                    CASE WHEN t.lowest > t.topological_ordering THEN 0
                        ELSE t.stream_ordering END
                )
                AND e.topological_ordering <= t.highest
                AND user_sees(e, t.joined_since, t.own_audiences, t.shared_audiences, t.world_audiences, t.shared_before, t.reader_nid, t.unread)
                AND not_ignored(e, t.ignored)
                AND is_wanted(e, t.types, t.not_types, t.senders, t.not_senders, t.contains_url)
            ORDER BY e.topological_ordering ASC, e.stream_ordering ASC
            LIMIT $4::bigint
        ) AS e
        ORDER BY t.lowest ASC, e.topological_ordering ASC, e.stream_ordering ASC
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
