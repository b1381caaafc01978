-- Sent by storage.queries.sharing.sharing_changes. Parameters: $1 user_id text, $2 since bigint, $3
-- upto bigint, $4 tokens int[], $5 writers text[], $6 writer_positions bigint[].

WITH
further AS MATERIALIZED (  -- of each token (0 since, 1 to), the writers that are further
    SELECT *
    FROM unnest($4::int[], $5::text[], $6::bigint[]) AS f (token, instance_name, stream_id)
),
covered AS MATERIALIZED (  -- the position of each writer in both tokens
    SELECT w.writer_nid, COALESCE(s.stream_id, $2::bigint) AS since,
        COALESCE(t.stream_id, $3::bigint) AS upto
    FROM writers w
    LEFT JOIN further s ON s.token = 0 AND s.instance_name = w.instance_name
    LEFT JOIN further t ON t.token = 1 AND t.instance_name = w.instance_name
),
me AS MATERIALIZED (
    SELECT p.principal_nid, k.state_key_nid
    FROM principals p
    JOIN state_keys k ON k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = p.name
    WHERE p.name = $1::text
),
own AS MATERIALIZED (  -- rooms that the user is in, or may have been in since a token
    SELECT m.room_nid, m.membership = 5 /* JOIN */ AS joined
    FROM me
    JOIN memberships m USING (principal_nid)
    WHERE m.membership = 5 /* JOIN */ OR m.stream_ordering > LEAST($2::bigint, $3::bigint)
),
change AS MATERIALIZED (  -- of members after a token, with the membership before each
    SELECT d.room_nid, d.state_key_nid, d.stream_ordering, e.membership,
        d.stream_ordering > c.since AS after_since, d.stream_ordering > c.upto AS after_upto
    FROM own
    -- here and below one by one: of the user's rooms, not of all
    CROSS JOIN LATERAL (
        SELECT *
        FROM state_deltas x
        WHERE x.room_nid = own.room_nid AND x.stream_ordering > LEAST($2::bigint, $3::bigint)
        OFFSET 0
    ) AS d
    JOIN covered c USING (writer_nid)
    CROSS JOIN LATERAL (
        SELECT k.type_nid FROM state_keys k WHERE k.state_key_nid = d.state_key_nid OFFSET 0
    ) AS k
    LEFT JOIN LATERAL (
        SELECT x.membership FROM events x WHERE x.event_nid = d.prev_event_nid OFFSET 0
    ) AS e ON true
    WHERE d.stream_ordering > LEAST(c.since, c.upto) AND k.type_nid = 2 /* TYPE_MEMBER */
),
value AS (  -- each membership of these, up to its change, or to the end
    SELECT v.*,
        min(v.stream_ordering) FILTER (WHERE v.after_since) OVER member AS since,
        min(v.stream_ordering) FILTER (WHERE v.after_upto) OVER member AS upto
    FROM (
        SELECT * FROM change
        UNION ALL
        SELECT n.room_nid, n.state_key_nid, 9223372036854775807, c.membership, true, true
        FROM (SELECT DISTINCT room_nid, state_key_nid FROM change) AS n
        LEFT JOIN LATERAL (
            SELECT x.membership
            FROM current_state x
            WHERE x.room_nid = n.room_nid AND x.state_key_nid = n.state_key_nid
            OFFSET 0
        ) AS c ON true
    ) AS v
    WINDOW member AS (PARTITION BY v.room_nid, v.state_key_nid)
),
life AS MATERIALIZED (  -- when each was joined: from one token, which has no bound, to the other
    SELECT v.room_nid, v.state_key_nid,
        COALESCE(range_agg(v.during) FILTER (WHERE v.membership = 5 /* JOIN */), '{}') AS during
    FROM (
        SELECT *, CASE WHEN v.since <= v.upto
            THEN int8range(lag(v.stream_ordering) OVER member, NULLIF(v.stream_ordering, v.upto))
            -- back in time
            ELSE int8range(-NULLIF(v.stream_ordering, v.since), -lag(v.stream_ordering) OVER member)
            END AS during
        FROM value v
        WHERE v.stream_ordering BETWEEN LEAST(v.since, v.upto) AND GREATEST(v.since, v.upto)
        WINDOW member AS (PARTITION BY v.room_nid, v.state_key_nid ORDER BY v.stream_ordering)
    ) AS v
    GROUP BY v.room_nid, v.state_key_nid
),
room AS MATERIALIZED (  -- when the user was joined
    SELECT o.room_nid,
        COALESCE(l.during, CASE WHEN o.joined THEN '{(,)}' ELSE '{}' END::int8multirange) AS during
    FROM own o
    CROSS JOIN me
    LEFT JOIN life l ON l.room_nid = o.room_nid AND l.state_key_nid = me.state_key_nid
),
concerned AS MATERIALIZED (  -- users who did not share a room of these all the time
    SELECT l.state_key_nid
    FROM room r
    JOIN life l USING (room_nid)
    WHERE r.during * l.during NOT IN ('{}', '{(,)}')
    UNION
    SELECT c.state_key_nid
    FROM room r
    CROSS JOIN LATERAL (
        SELECT x.state_key_nid
        FROM current_state x
        WHERE x.room_nid = r.room_nid AND x.membership = 5 /* JOIN */
        OFFSET 0
    ) AS c
    WHERE r.during NOT IN ('{}', '{(,)}')
),
shared AS (  -- for each of them and each room, when it was shared
    SELECT l.state_key_nid, r.during * l.during AS during
    FROM room r
    JOIN life l USING (room_nid)
    WHERE l.state_key_nid IN (SELECT state_key_nid FROM concerned)
    UNION ALL
    SELECT c.state_key_nid, r.during
    FROM concerned v
    CROSS JOIN LATERAL (
        SELECT x.room_nid, x.state_key_nid
        FROM current_state x
        WHERE x.state_key_nid = v.state_key_nid AND x.membership = 5 /* JOIN */
        OFFSET 0
    ) AS c
    JOIN room r ON r.room_nid = c.room_nid
    WHERE (c.room_nid, c.state_key_nid) NOT IN (SELECT room_nid, state_key_nid FROM life)
),
changed AS (
    SELECT s.state_key_nid, range_agg(s.during) AS during
    FROM shared s
    GROUP BY s.state_key_nid
)
SELECT k.state_key AS user_id, upper_inf(c.during) AS gained, NULL::bigint AS purged_upto
FROM changed c
CROSS JOIN LATERAL (
    SELECT x.state_key FROM state_keys x WHERE x.state_key_nid = c.state_key_nid OFFSET 0
) AS k
WHERE k.state_key <> $1::text AND c.during <> '{(,)}'
    AND (lower_inf(c.during) OR upper_inf(c.during))
UNION ALL
SELECT NULL, NULL, purged_upto
FROM purged_streams
WHERE stream_name = 'events'
