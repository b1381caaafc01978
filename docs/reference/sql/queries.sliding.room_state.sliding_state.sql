-- Sent by storage.queries.sliding.room_state.sliding_states. Parameters: $1 room_nids int[], $2
-- whole boolean[], $3 lower bigint[], $4 upper bigint[], $5 own_upper bigint[], $6 is_joined
-- boolean[], $7 wanted int[], $8 grown int[], $9 dropped int[], $10 all_members boolean[], $11
-- member_rooms int[], $12 member_ids text[], $13 pattern_numbers int[], $14 pattern_types text[],
-- $15 pattern_keys text[], $16 user_id text, $17 shown_rooms int[], $18 shown_members bigint[].

WITH
-- More than 150 lines: the required state, names, heroes and counts share the deltas that are read
-- once.
room AS MATERIALIZED (
    SELECT r.*, own.state_key_nid AS own_key_nid
    FROM unnest($1::int[], $2::boolean[], $3::bigint[], $4::bigint[], $5::bigint[], $6::boolean[],
            $7::int[], $8::int[], $9::int[], $10::boolean[])
        AS r (room_nid, whole, lower, upper, own_upper, is_joined, wanted, grown, dropped,
            all_members)
    LEFT JOIN state_keys own ON own.type_nid = 2 /* TYPE_MEMBER */ AND own.state_key = $16::text
),
pattern AS MATERIALIZED (  -- sets of patterns, by number
    SELECT p.number, t.type_nid, p.state_key, p.type IS NULL AS is_any_type
    FROM unnest($13::int[], $14::text[], $15::text[]) AS p (number, type, state_key)
    LEFT JOIN event_types t USING (type)
    WHERE p.type IS NULL OR t.type_nid IS NOT NULL
),
changed AS MATERIALIZED (  -- each key, with its values before and after the range
    SELECT r.room_nid, k.type_nid, k.state_key, k.state_key_nid, d.before_nid, d.end_nid, EXISTS (
            SELECT FROM pattern p WHERE p.number = r.wanted AND (p.type_nid = k.type_nid OR (p.is_any_type AND k.type_nid <> 2 /* TYPE_MEMBER */))
                    AND (p.state_key IS NULL OR p.state_key = k.state_key)
        ) OR (r.all_members AND k.type_nid = 2 /* TYPE_MEMBER */) AS is_wanted, EXISTS (
            SELECT FROM pattern p WHERE p.number = r.dropped AND (p.type_nid = k.type_nid OR (p.is_any_type AND k.type_nid <> 2 /* TYPE_MEMBER */))
                    AND (p.state_key IS NULL OR p.state_key = k.state_key)
        ) AS is_dropped
    FROM room r
    CROSS JOIN LATERAL (
        SELECT d.state_key_nid,
            (array_agg(d.prev_event_nid ORDER BY d.stream_ordering))[1] AS before_nid,
            (array_agg(d.event_nid ORDER BY d.stream_ordering DESC))[1] AS end_nid
        FROM state_deltas d
        WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
            AND d.stream_ordering <= r.own_upper
            AND (d.stream_ordering <= r.upper OR d.state_key_nid = r.own_key_nid)
            AND NOT r.whole
        GROUP BY d.state_key_nid
    ) AS d
    JOIN state_keys k USING (state_key_nid)
    WHERE d.before_nid IS DISTINCT FROM d.end_nid
),
later AS MATERIALIZED (  -- rooms that the user has left: keys that changed after that
    SELECT DISTINCT ON (d.room_nid, d.state_key_nid) d.room_nid, d.state_key_nid,
        d.prev_event_nid AS event_nid
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.upper
    WHERE NOT r.is_joined
        AND (d.stream_ordering > r.own_upper OR d.state_key_nid IS DISTINCT FROM r.own_key_nid)
    ORDER BY d.room_nid, d.state_key_nid, d.stream_ordering
),
due AS MATERIALIZED (  -- what may have changed of the summary of a room
    SELECT r.room_nid, r.is_joined, has.name, has.avatar, has.members,
        CASE WHEN (has.name OR has.members) AND NOT EXISTS (
                    SELECT
                    FROM (VALUES (9 /* KEY_NAME */)) AS k (state_key_nid)
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
            THEN COALESCE(NULLIF(
                heroes_of(r.room_nid, r.upper, ARRAY[4 /* INVITE */, 5 /* JOIN */]::smallint[], $16::text), '{}'),
                heroes_of(r.room_nid, r.upper, ARRAY[1 /* BAN */, 2 /* LEAVE */]::smallint[], $16::text)) END AS heroes
    FROM room r
    CROSS JOIN LATERAL (
        SELECT r.whole OR EXISTS (SELECT FROM changed c
                WHERE c.room_nid = r.room_nid AND c.state_key_nid = 9 /* KEY_NAME */) AS name,
            r.whole OR EXISTS (SELECT FROM changed c
                WHERE c.room_nid = r.room_nid AND c.state_key_nid = 12 /* KEY_AVATAR */) AS avatar,
            r.whole OR EXISTS (SELECT FROM changed c
                WHERE c.room_nid = r.room_nid AND c.type_nid = 2 /* TYPE_MEMBER */) AS members
        OFFSET 0
    ) AS has
),
selected AS MATERIALIZED (  -- the state to read whether it has changed or not
    SELECT room_nid, CASE WHEN whole THEN wanted ELSE grown END AS number
    FROM room
),
wild AS MATERIALIZED (  -- and its keys but for members, where patterns name them by wildcards
    SELECT DISTINCT s.room_nid, s.number, c.state_key_nid
    FROM selected s
    JOIN pattern p USING (number)
    JOIN rooms USING (room_nid)
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM state_but_members(rooms.current_state_group)
        UNION ALL
        SELECT state_key_nid FROM later WHERE later.room_nid = s.room_nid
    ) AS c
    WHERE p.is_any_type OR (p.state_key IS NULL AND p.type_nid <> 2 /* TYPE_MEMBER */)
),
needed AS (
    SELECT 'state' AS kind, s.room_nid, k.state_key_nid
    FROM selected s
    JOIN pattern p USING (number)
    CROSS JOIN LATERAL (  -- one by one, also below: a join could read the keys of all members
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = p.type_nid AND state_key = p.state_key OFFSET 0
    ) AS k
    UNION
    SELECT 'state', w.room_nid, w.state_key_nid
    FROM wild w
    JOIN state_keys k USING (state_key_nid)
    WHERE EXISTS (SELECT FROM pattern p WHERE p.number = w.number AND (p.type_nid = k.type_nid OR (p.is_any_type AND k.type_nid <> 2 /* TYPE_MEMBER */))
            AND (p.state_key IS NULL OR p.state_key = k.state_key))
    UNION
    SELECT 'state', s.room_nid, c.state_key_nid
    FROM selected s
    JOIN pattern p ON p.number = s.number AND p.type_nid = 2 /* TYPE_MEMBER */ AND p.state_key IS NULL
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM current_state
        WHERE room_nid = s.room_nid AND membership IS NOT NULL
        UNION ALL
        SELECT state_key_nid FROM later JOIN state_keys k USING (state_key_nid)
        WHERE later.room_nid = s.room_nid AND k.type_nid = 2 /* TYPE_MEMBER */
    ) AS c
    UNION
    SELECT 'state', i.room_nid, k.state_key_nid
    FROM unnest($11::int[], $12::text[]) AS i (room_nid, user_id)
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = 2 /* TYPE_MEMBER */ AND state_key = i.user_id OFFSET 0
    ) AS k
    UNION
    SELECT 'hero', d.room_nid, k.state_key_nid
    FROM due d
    CROSS JOIN LATERAL unnest(d.heroes) AS hero (user_id)
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = 2 /* TYPE_MEMBER */ AND state_key = hero.user_id OFFSET 0
    ) AS k
    UNION
    SELECT 'name', room_nid, 9 /* KEY_NAME */ FROM due WHERE name
    UNION
    SELECT 'avatar', room_nid, 12 /* KEY_AVATAR */ FROM due WHERE avatar
),
shown AS (  -- rooms that the user is not in, with the membership event
    SELECT *
    FROM unnest($17::int[], $18::bigint[]) AS s (room_nid, member_nid)
),
entry AS (
    SELECT n.kind, n.room_nid, n.state_key_nid,
        CASE WHEN l.room_nid IS NULL THEN c.event_nid ELSE l.event_nid END AS event_nid
    FROM needed n
    LEFT JOIN current_state c USING (room_nid, state_key_nid)
    LEFT JOIN later l USING (room_nid, state_key_nid)
    UNION
    -- a removal is sent to a client that has the key, even if it no longer wants it
    SELECT CASE WHEN end_nid IS NULL THEN 'removed' WHEN is_wanted THEN 'state' ELSE 'dropped' END,
        room_nid, state_key_nid, end_nid
    FROM changed
    WHERE is_wanted OR is_dropped
    UNION ALL
    SELECT 'lost', room_nid, NULL, NULL FROM wild WHERE state_key_nid IS NULL
    UNION ALL
    SELECT 'own', room_nid, NULL, member_nid FROM shown
    UNION ALL
    -- create, join rules, name, topic, canonical alias, avatar, encryption
        SELECT 'shown', s.room_nid, c.state_key_nid, c.event_nid
        FROM shown s
        JOIN current_state c ON c.room_nid = s.room_nid
            AND c.state_key_nid IN (1 /* KEY_CREATE */, 4 /* KEY_JOIN_RULES */, 9 /* KEY_NAME */, 10 /* KEY_TOPIC */,
                11 /* KEY_CANONICAL_ALIAS */, 12 /* KEY_AVATAR */, 13 /* KEY_ENCRYPTION */)
)
SELECT CASE WHEN e.event_nid IS NULL AND n.event_nid IS NOT NULL
            OR gone.type IS NULL AND n.kind = 'removed' THEN 'lost' ELSE n.kind END AS kind,
    n.room_nid,
    e.event_id, e.stream_ordering, e.topological_ordering,
    CASE WHEN e.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = e.redacted_by) END AS redacted_by,
    e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.json,
    gone.type AS removed_type, gone.state_key AS removed_key, CASE WHEN n.kind = 'own' THEN (
        SELECT o.stripped_state FROM out_of_band_memberships o
        WHERE o.room_nid = n.room_nid AND o.event_nid = n.event_nid
    ) END AS stripped_state,
    NULL::int AS joined_count, NULL::int AS invited_count, NULL::text[] AS heroes
FROM entry n
-- not `stored_events`: it looks its room up for each event
LEFT JOIN events e ON e.event_nid = n.event_nid
LEFT JOIN LATERAL (  -- once for each of the few removed keys: a join could hash all keys
    SELECT t.type, k.state_key
    FROM state_keys k
    JOIN event_types t USING (type_nid)
    WHERE k.state_key_nid = n.state_key_nid AND n.kind = 'removed'
    OFFSET 0
) AS gone ON true
WHERE n.event_nid IS NOT NULL OR n.kind <> 'state'
UNION ALL
SELECT 'summary', d.room_nid, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, CASE WHEN d.is_joined AND d.members THEN i.joined_count END,
    CASE WHEN d.is_joined AND d.members THEN i.invited_count END, d.heroes
FROM due d
JOIN rooms i USING (room_nid)
WHERE d.name OR d.avatar OR d.members
