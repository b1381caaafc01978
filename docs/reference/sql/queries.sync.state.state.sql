-- Sent by storage.queries.sync.state.states. Parameters: $1 room_nids int[], $2 whole boolean[], $3
-- only_key_nids int[], $4 lower bigint[], $5 start bigint[], $6 upper bigint[], $7 is_joined
-- boolean[], $8 lazy boolean, $9 member_rooms int[], $10 member_ids text[], $11 is_filtered
-- boolean, $12 types text[], $13 not_types text[], $14 senders text[], $15 not_senders text[], $16
-- contains_url boolean, $17 user_id text, $18 shown_rooms int[], $19 shown_members bigint[], $20
-- has_first boolean[], $21 ended_keys int[].

WITH
-- More than 150 lines: states at the start and the end, summaries and invites share the deltas that
-- are read once.
-- with the first event of the timeline, at `start`; 0 if there is none
room AS MATERIALIZED (
    SELECT i.*, COALESCE(e.event_nid, 0) AS first_nid, e.state_key_nid AS first_key_nid,
        e.membership IS NOT NULL AS first_is_member, CASE
        WHEN e.after_gap THEN e.state_group_before END AS given_group
    FROM unnest($1::int[], $2::boolean[], $3::int[], $4::bigint[], $5::bigint[], $6::bigint[], $7::boolean[], $20::boolean[])
        AS i (room_nid, whole, only_key_nid, lower, start, upper, is_joined, has_first)
    LEFT JOIN events e ON i.has_first AND e.stream_ordering = i.start
),
later AS (  -- members that changed after the position of the request
    SELECT DISTINCT ON (d.room_nid, d.state_key_nid) d.room_nid, d.state_key_nid,
        COALESCE(e.membership, 0) AS membership, COALESCE(c.membership, 0) AS membership_now
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.upper
    LEFT JOIN events e ON e.event_nid = d.prev_event_nid
    LEFT JOIN current_state c ON c.room_nid = d.room_nid AND c.state_key_nid = d.state_key_nid
    WHERE r.is_joined
    ORDER BY d.room_nid, d.state_key_nid, d.stream_ordering
),
due AS MATERIALIZED (  -- joined rooms with a summary that may have changed: members, name, alias
    SELECT r.room_nid, i.joined_count, i.invited_count,
        CASE WHEN NOT EXISTS (
                    SELECT
                    FROM (VALUES (9 /* KEY_NAME */), (11 /* KEY_CANONICAL_ALIAS */)) AS k (state_key_nid)
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
                ) THEN COALESCE(NULLIF(
            heroes_of(r.room_nid, r.upper, ARRAY[4 /* INVITE */, 5 /* JOIN */]::smallint[], $17::text), '{}'),
            heroes_of(r.room_nid, r.upper, ARRAY[1 /* BAN */, 2 /* LEAVE */]::smallint[], $17::text)) END AS heroes
    FROM room r
    JOIN rooms i USING (room_nid)
    WHERE r.is_joined AND (r.whole OR EXISTS (
        SELECT
        FROM state_deltas d
        JOIN state_keys k USING (state_key_nid)
        WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
            AND d.stream_ordering <= r.upper
            AND (k.type_nid = 2 /* TYPE_MEMBER */
                OR k.state_key_nid IN (9 /* KEY_NAME */, 11 /* KEY_CANONICAL_ALIAS */))
    ))
),
-- the value that a first event after a gap has replaced: of the state before that event, because
-- the value of the room may be older
given AS MATERIALIZED (
    SELECT r.room_nid, r.first_key_nid AS state_key_nid, replaced.event_nid,
        COALESCE(replaced.is_lost, false) AS is_lost
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering = r.start
        AND d.state_key_nid = r.first_key_nid AND d.event_nid = r.first_nid
    -- the last row of the path that has the key, or a lost row; the group itself may be lost
    LEFT JOIN LATERAL (
        SELECT g.state_group IS NULL AS is_lost, NULLIF(own.event_nid, 0) AS event_nid
        FROM state_path(r.given_group) AS step
        LEFT JOIN state_groups g ON g.state_group = step.part
        CROSS JOIN LATERAL (
            SELECT own_entry(r.first_key_nid, r.first_is_member, g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS event_nid
        ) AS own
        WHERE g.state_group IS NULL OR own.event_nid IS NOT NULL
        ORDER BY g.state_group IS NULL DESC, step.place DESC
        LIMIT 1
    ) AS replaced ON true
    WHERE r.given_group IS NOT NULL
),
shown AS (  -- rooms that the user is invited to or knocks at, with the membership event. With a
            -- key also rooms where that may have ended
    SELECT *
    FROM unnest($18::int[], $19::bigint[], $21::int[])
        AS s (room_nid, member_nid, ended_key_nid)
),
filter AS MATERIALIZED (
    SELECT * FROM filter_of($12::text[], $13::text[], $14::text[], $15::text[], $16::boolean)
),
-- lazily loaded members: those of the timelines and of the summaries, as if the client knew none
wanted AS MATERIALIZED (
    SELECT i.room_nid, k.state_key_nid
    FROM (
        SELECT * FROM unnest($9::int[], $10::text[]) AS i (room_nid, user_id)
        UNION
        SELECT d.room_nid, unnest(d.heroes) FROM due d WHERE $8::boolean
    ) AS i (room_nid, user_id)
    CROSS JOIN LATERAL (  -- one by one: a join could read the keys of all members
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = 2 /* TYPE_MEMBER */ AND state_key = i.user_id OFFSET 0
    ) AS k
),
-- rooms that the client knows: each changed key, with its value before the range, at the start and
-- at the end of the timeline
changed AS (
    SELECT r.room_nid, r.whole, d.state_key_nid,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering))[1] AS before_nid,
        (array_agg(
            CASE WHEN came.before_first THEN d.event_nid ELSE d.prev_event_nid END
            ORDER BY NOT came.before_first, CASE WHEN came.before_first THEN -d.stream_ordering
                ELSE d.stream_ordering END
        ))[1] AS start_nid,
        (array_agg(d.event_nid ORDER BY d.stream_ordering DESC))[1] AS end_nid
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.lower
        AND d.stream_ordering <= r.upper
    -- other changes at the position of the first event were there before it: they are from the gap
    CROSS JOIN LATERAL (
        SELECT d.stream_ordering < r.start
            OR (d.stream_ordering = r.start AND d.event_nid IS DISTINCT FROM r.first_nid)
    ) AS came (before_first)
    WHERE (NOT r.whole OR r.lower > 0)
        AND (r.only_key_nid IS NULL OR d.state_key_nid = r.only_key_nid)
    GROUP BY r.room_nid, r.whole, d.state_key_nid
),
-- whole rooms, and members that the client may not know: each key that changed after the start of
-- the timeline
undone AS (
    SELECT r.room_nid, d.state_key_nid,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering))[1] AS start_nid,
        (array_agg(d.prev_event_nid
            ORDER BY d.stream_ordering) FILTER (WHERE d.stream_ordering > r.upper))[1] AS end_nid,
        bool_or(d.stream_ordering > r.upper) AS end_differs
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering >= r.start
        AND (d.stream_ordering > r.start OR d.event_nid = r.first_nid)
    WHERE r.whole OR $8::boolean
    GROUP BY r.room_nid, d.state_key_nid
),
current AS (  -- the current state of these rooms
    SELECT c.room_nid, c.state_key_nid, c.event_nid
    FROM room r
    JOIN current_state c USING (room_nid)
    WHERE r.whole AND NOT $8::boolean
    UNION ALL
    SELECT r.room_nid, s.state_key_nid, s.event_nid
    FROM room r
    JOIN rooms USING (room_nid)
    CROSS JOIN LATERAL state_but_members(rooms.current_state_group) AS s
    WHERE r.whole AND $8::boolean
    UNION ALL
    SELECT c.room_nid, c.state_key_nid, c.event_nid
    FROM wanted
    JOIN current_state c USING (room_nid, state_key_nid)
),
value AS (  -- each key: the value that the client knows, at the start, and at the end
    SELECT room_nid, state_key_nid, before_nid, CASE WHEN given.room_nid IS NULL THEN start_nid
        ELSE given.event_nid END AS start_nid, end_nid
    FROM changed
    LEFT JOIN given USING (room_nid, state_key_nid)
    WHERE NOT whole AND (room_nid, state_key_nid) NOT IN (SELECT room_nid, state_key_nid
        FROM wanted)
    UNION ALL
    SELECT room_nid, state_key_nid, NULL,
        CASE WHEN given.room_nid IS NOT NULL THEN given.event_nid
            WHEN u.end_differs IS NULL THEN c.event_nid ELSE u.start_nid END,
        CASE WHEN u.end_differs THEN u.end_nid ELSE c.event_nid END
    FROM current c
    FULL JOIN undone u USING (room_nid, state_key_nid)
    LEFT JOIN given USING (room_nid, state_key_nid)
    WHERE NOT $8::boolean
        OR (room_nid, state_key_nid) IN (SELECT room_nid, state_key_nid FROM wanted)
        -- one key at a time: EXISTS could hash all members of the database
        OR (room_nid IN (SELECT room_nid FROM room WHERE whole)
            AND (SELECT k.type_nid <> 2 /* TYPE_MEMBER */ FROM state_keys k
                WHERE k.state_key_nid = COALESCE(c.state_key_nid, u.state_key_nid)))
        OR state_key_nid IS NULL  -- rows of the state are lost
),
entry AS (
    SELECT CASE WHEN start_nid = end_nid THEN 'both' ELSE 'start' END AS kind, room_nid,
        state_key_nid, start_nid AS event_nid
    FROM value
    WHERE start_nid IS NOT NULL AND start_nid IS DISTINCT FROM before_nid
    UNION ALL
    SELECT 'end', room_nid, state_key_nid, end_nid
    FROM value
    WHERE end_nid IS NOT NULL AND end_nid IS DISTINCT FROM before_nid
        AND end_nid IS DISTINCT FROM start_nid
    UNION ALL
    SELECT 'removed', room_nid, state_key_nid, NULL
    FROM changed
    WHERE before_nid IS NOT NULL AND end_nid IS NULL
    UNION ALL
    SELECT 'lost', room_nid, NULL, NULL
    FROM value
    WHERE state_key_nid IS NULL
    UNION ALL
    SELECT 'lost', room_nid, NULL, NULL
    FROM given
    WHERE is_lost
    UNION ALL
    SELECT 'own', s.room_nid, NULL, s.member_nid
    FROM shown s
    WHERE NOT EXISTS (  -- an end that the room's state has did not come out of band
        SELECT
        FROM current_state c
        WHERE c.room_nid = s.room_nid AND c.state_key_nid = s.ended_key_nid
            AND c.event_nid = s.member_nid
    )
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
CROSS JOIN filter
WHERE e.event_nid IS NULL OR NOT $11::boolean OR n.kind IN ('own', 'shown')
    OR is_wanted(e, filter.types, filter.not_types, filter.senders, filter.not_senders,
        filter.contains_url)
UNION ALL
SELECT 'summary', d.room_nid, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL,
    d.joined_count + COALESCE((
        SELECT sum((l.membership = 5 /* JOIN */)::int - (l.membership_now = 5 /* JOIN */)::int)
        FROM later l WHERE l.room_nid = d.room_nid), 0)::int,
    d.invited_count + COALESCE((
        SELECT sum((l.membership = 4 /* INVITE */)::int - (l.membership_now = 4 /* INVITE */)::int)
        FROM later l WHERE l.room_nid = d.room_nid), 0)::int,
    d.heroes
FROM due d
