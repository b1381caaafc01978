-- Sent by storage.queries.unread._rows. Parameters: $1 user_id text, $2 room_nids int[], $3 types
-- text[], $4 ignored text[], $5 count_max bigint, $6 rows_max bigint, $7 room_ids text[], $8
-- related_to bigint[], $9 counts_reactions boolean, $10 thread_keys bigint[].

WITH RECURSIVE
-- More than 150 lines: the condition of an event that counts is there three times, as each of the
-- three indexes needs a part of its own.
reader AS MATERIALIZED (
    SELECT p.principal_nid,
        ARRAY(SELECT type_nid FROM event_types WHERE type = ANY($3::text[])) AS types,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE($4::text[], ARRAY(
            -- clients can store anything there, also the one character that jsonb cannot have
            SELECT jsonb_path_query(replace(convert_from(d.content, 'UTF8'), '\u0000', '\ufffd')::jsonb,
                '$.ignored_users.keyvalue().key', silent => true) #>> ARRAY[]::text[]
            FROM principals p
            CROSS JOIN event_types t
            JOIN account_data d ON d.principal_nid = p.principal_nid AND d.room_nid = 0
                AND d.type_nid = t.type_nid
            WHERE p.name = $1::text AND t.type = 'm.ignored_user_list'
        )))) AS ignored
    FROM principals p
    WHERE p.name = $1::text
),
named AS MATERIALIZED (  -- by number or by id; all that the user has joined if neither is given
    SELECT unnest($2::int[]) AS room_nid
    UNION ALL
    SELECT room_nid FROM rooms WHERE room_id = ANY($7::text[])
    UNION ALL
    SELECT m.room_nid
    FROM reader u
    JOIN memberships m USING (principal_nid)
    WHERE $2::int[] IS NULL AND $7::text[] IS NULL AND m.membership = 5 /* JOIN */
),
room AS MATERIALIZED (  -- the receipts of each room, by thread, as stream orderings
    SELECT n.room_nid, r.room_id, r.last_stream_ordering, m.event_nid AS member_nid, c.*
    FROM reader u
    CROSS JOIN named n
    -- room by room: otherwise all memberships of the user would be read for a few of them
    CROSS JOIN LATERAL (
        SELECT m.event_nid FROM memberships m
            WHERE m.principal_nid = u.principal_nid AND m.room_nid = n.room_nid
                AND m.membership = 5 /* JOIN */ OFFSET 0
    ) AS m
    CROSS JOIN LATERAL (
        SELECT r.room_id, r.last_stream_ordering FROM rooms r WHERE r.room_nid = n.room_nid OFFSET 0
    ) AS r
    CROSS JOIN LATERAL (
        SELECT max(upto) FILTER (WHERE thread_id = '') AS whole,
            max(upto) FILTER (WHERE thread_id = 'main') AS main,
            min(upto) FILTER (WHERE thread_id NOT IN ('', 'main')) AS first_thread,
            array_agg(relation_key(thread_id)) FILTER (WHERE thread_id NOT IN ('', 'main'))
                AS threads,
            array_agg(upto) FILTER (WHERE thread_id NOT IN ('', 'main')) AS threads_upto
        FROM (
            SELECT c.thread_id, CASE WHEN e.backfilled THEN COALESCE((
                SELECT o.stream_ordering
                FROM (
                    SELECT l.topological_ordering, l.stream_ordering, l.backfilled
                    FROM events l
                    WHERE l.room_nid = e.room_nid AND NOT l.outlier
                        AND (l.topological_ordering, l.stream_ordering)
                            < (e.topological_ordering, e.stream_ordering)
                    ORDER BY l.topological_ordering DESC, l.stream_ordering DESC
                    LIMIT 10000
                ) AS o
                WHERE NOT o.backfilled
                ORDER BY o.topological_ordering DESC, o.stream_ordering DESC
                LIMIT 1
            ), 0) ELSE e.stream_ordering END AS upto
            FROM receipts c
            CROSS JOIN LATERAL (
                SELECT * FROM events e WHERE e.event_id = c.event_id OFFSET 0
            ) AS e
            WHERE c.room_nid = n.room_nid AND c.principal_nid = u.principal_nid
                AND c.receipt_type IN ('m.read', 'm.read.private')
                AND e.room_nid = n.room_nid AND NOT e.outlier
        ) AS c
    ) AS c
),
has_news AS MATERIALIZED (  -- the others are read to their end
    SELECT r.*, joined.since
    FROM room r
    CROSS JOIN LATERAL (
        -- the last join: back over changes of the profile, which name their predecessor
        SELECT CASE WHEN r.whole IS NULL AND (r.main IS NULL OR $9::boolean OR EXISTS (
            SELECT FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, 0)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND e.rel_type_nid NOT IN (19 /* REL_REPLACE */, 20 /* REL_ANNOTATION */)
                AND NOT e.outlier AND NOT e.backfilled
        )) THEN (
            WITH RECURSIVE stay AS (
                SELECT e.stream_ordering, e.state_key_nid,
                    auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4) AS auth_events
                FROM events e
                WHERE e.event_nid = r.member_nid
                UNION ALL
                SELECT before.stream_ordering, stay.state_key_nid, before.auth_events
                FROM stay
                CROSS JOIN LATERAL (
                    SELECT e.stream_ordering, auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4) AS auth_events
                    FROM unnest(stay.auth_events) AS a (event_nid)
                    JOIN events e USING (event_nid)
                    WHERE e.type_nid = 2 /* TYPE_MEMBER */ AND e.state_key_nid = stay.state_key_nid
                        AND e.membership = 5 /* JOIN */
                    LIMIT 1
                ) AS before
            )
            SELECT COALESCE(min(stream_ordering), 0) FROM stay
        ) END AS since
        OFFSET 0
    ) AS joined
    WHERE r.last_stream_ordering > COALESCE(GREATEST(r.whole, r.main), 0)
        OR r.last_stream_ordering > COALESCE(r.whole, joined.since)
),
open AS MATERIALIZED (
    SELECT r.*, COALESCE(GREATEST(r.whole, r.main), r.since) AS main_upto,
        LEAST(COALESCE(r.whole, LEAST(r.since, r.first_thread)), GREATEST(r.whole, r.main))
            AS related_upto,
        u.principal_nid, u.types, u.ignored, v.*
    FROM has_news r
    CROSS JOIN reader u
    CROSS JOIN LATERAL visibility_of(r.room_nid, u.principal_nid) AS v
),
related AS MATERIALIZED (  -- what is in a thread, or may be
    SELECT r.room_id, r.whole, r.since, r.threads, r.threads_upto, e.*,
        CASE WHEN e.rel_type_nid = 22 /* REL_THREAD */ THEN e.relates_to
            ELSE known.thread_key END AS thread_key
    FROM open r
    CROSS JOIN LATERAL (
        (SELECT e.relates_to, e.rel_type_nid, e.event_nid, e.stream_ordering, e.type_nid = ANY(r.types) AND e.sender_nid <> r.principal_nid AND user_sees_relation(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread, r.ignored)
            AND (was_there(e, r.joined_since, r.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, r.reader_nid, r.unread))
        AND (was_there(e, r.joined_since, r.joined_audiences)
            OR was_there_before(e, r.reader_nid, r.unread)) AS counts,
            e.sender_nid = r.principal_nid AND e.state_key_nid IS NULL
            AND COALESCE(e.rel_type_nid NOT IN (19 /* REL_REPLACE */, 20 /* REL_ANNOTATION */), true) AS is_own
        FROM events e
        WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, r.related_upto)
            AND e.room_nid BETWEEN r.room_nid AND r.room_nid
            AND e.rel_type_nid NOT IN (19 /* REL_REPLACE */, 20 /* REL_ANNOTATION */) AND NOT e.outlier AND NOT e.backfilled
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT $6::bigint)
        UNION ALL
        (SELECT e.relates_to, e.rel_type_nid, e.event_nid, e.stream_ordering, e.type_nid = ANY(r.types) AND e.sender_nid <> r.principal_nid AND user_sees_relation(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread, r.ignored)
            AND (was_there(e, r.joined_since, r.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, r.reader_nid, r.unread))
        AND (was_there(e, r.joined_since, r.joined_audiences)
            OR was_there_before(e, r.reader_nid, r.unread)) AS counts,
            false AS is_own
        FROM events e
        WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, r.related_upto)
            AND e.room_nid BETWEEN r.room_nid AND r.room_nid
            AND $9::boolean AND e.rel_type_nid = 20 /* REL_ANNOTATION */ AND NOT e.outlier AND NOT e.backfilled
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT $6::bigint)
    ) AS e
    LEFT JOIN unnest($8::bigint[], $10::bigint[]) AS known (relates_to, thread_key)
        ON known.relates_to = e.relates_to AND e.rel_type_nid <> 22 /* REL_THREAD */
    WHERE e.counts OR e.is_own
)
SELECT 'room' AS kind, r.room_id, NULL::bigint AS key, 0 AS events, NULL::text AS event_id,
    NULL::bytea AS json
FROM room r
UNION ALL
SELECT 'room', r.room_id, NULL, timeline.events, NULL, NULL
FROM open r
CROSS JOIN LATERAL (
    SELECT count(*)::int AS events
    FROM (  -- the latest ones: the user has read those before the own one
        SELECT e.stream_ordering,
            max(e.stream_ordering) FILTER (WHERE e.is_own) OVER () AS said
        FROM (
            SELECT e.stream_ordering, e.counts, e.is_own
            FROM (
                SELECT e.stream_ordering, e.type_nid = ANY(r.types) AND e.sender_nid <> r.principal_nid AND user_sees_relation(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread, r.ignored)
                    AND (was_there(e, r.joined_since, r.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, r.reader_nid, r.unread))
                AND (was_there(e, r.joined_since, r.joined_audiences)
                    OR was_there_before(e, r.reader_nid, r.unread)) AND is_main AS counts, e.sender_nid = r.principal_nid AND e.state_key_nid IS NULL
                AND COALESCE(e.rel_type_nid NOT IN (19 /* REL_REPLACE */, 20 /* REL_ANNOTATION */), true) AND is_main AS is_own
                FROM events e
                CROSS JOIN LATERAL (
                    SELECT COALESCE(e.rel_type_nid NOT IN (19 /* REL_REPLACE */, 22 /* REL_THREAD */)
                        AND (e.relates_to = ANY($8::bigint[])) IS NOT TRUE, true) AS is_main
                ) AS place
                WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, r.main_upto)
                    AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                    AND NOT e.outlier AND NOT e.backfilled
                ORDER BY e.room_nid DESC, e.stream_ordering DESC
                LIMIT $6::bigint
            ) AS e
            WHERE e.counts OR e.is_own
            LIMIT $5::bigint
        ) AS e
    ) AS counted
    WHERE counted.stream_ordering > COALESCE(counted.said, 0)
) AS timeline
WHERE timeline.events > 0
UNION ALL
SELECT 'thread', t.room_id, t.thread_key, LEAST(t.events, $5::bigint)::int, x.event_id, x.json
FROM (
    SELECT e.room_id, e.thread_key, count(*) AS events, max(e.event_nid) AS event_nid
    FROM (
        SELECT e.*, max(e.stream_ordering) FILTER (WHERE e.is_own)
            OVER (PARTITION BY e.room_id, e.thread_key) AS said
        FROM related e
        WHERE e.thread_key IS NOT NULL
    ) AS e
    WHERE e.counts AND e.stream_ordering > COALESCE(e.said, 0)
        AND e.stream_ordering > COALESCE(GREATEST(e.whole, (
            SELECT max(o.upto)
            FROM unnest(e.threads, e.threads_upto) AS o (key, upto)
            WHERE o.key = e.thread_key
        )), e.since)
    GROUP BY e.room_id, e.thread_key
) AS t
CROSS JOIN LATERAL (
    SELECT e.event_id, e.json FROM events e WHERE e.event_nid = t.event_nid OFFSET 0
) AS x
UNION ALL
SELECT 'related', t.room_id, t.relates_to, 0, x.event_id, x.json
FROM (
    SELECT e.room_id, e.relates_to, max(e.event_nid) AS event_nid
    FROM related e
    WHERE $8::bigint[] IS NULL AND e.rel_type_nid <> 22 /* REL_THREAD */
    GROUP BY e.room_id, e.relates_to
) AS t
CROSS JOIN LATERAL (
    SELECT e.event_id, e.json FROM events e WHERE e.event_nid = t.event_nid OFFSET 0
) AS x
