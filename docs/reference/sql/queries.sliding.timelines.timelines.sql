-- Sent by storage.queries.sliding.timelines.timelines. Parameters: $1 user_id text, $2 room_nids
-- int[], $3 sent_upto bigint[], $4 is_inside boolean[], $5 is_new boolean[], $6 expands boolean[],
-- $7 timeline_max bigint[], $8 upto bigint, $9 least_position bigint, $10 writers text[], $11
-- writer_positions bigint[], $12 ignored text[], $13 bumping text[], $14 rows_max bigint.

WITH
-- More than 150 lines: what a room may show follows from its memberships, in the same snapshot as
-- its events.
reader AS MATERIALIZED (
    SELECT p.principal_nid, k.state_key_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY($12::text[])) AS ignored,
        ARRAY(SELECT type_nid FROM event_types WHERE type = ANY($13::text[])) AS bumping
    FROM principals p
    LEFT JOIN state_keys k ON k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = p.name
    WHERE p.name = $1::text
),
own AS MATERIALIZED (  -- the given rooms, with the membership of the user
    SELECT g.*, u.*, m.membership, m.event_nid AS member_nid, m.stream_ordering, m.writer_nid
    FROM unnest($2::int[], $3::bigint[], $4::boolean[], $5::boolean[], $6::boolean[], $7::bigint[])
        AS g (room_nid, sent_upto, is_inside, is_new, expands, timeline_limit)
    CROSS JOIN reader u
    -- room by room: otherwise all memberships of the user would be read for a few of them
    CROSS JOIN LATERAL (
        SELECT * FROM memberships m
        WHERE m.principal_nid = u.principal_nid AND m.room_nid = g.room_nid
        OFFSET 0
    ) AS m
),
-- rooms with an event at or below the furthest position of the token that the token does not
-- cover: its writer was behind
late AS MATERIALIZED (
    SELECT f.room_nid, min(f.stream_ordering) - 1 AS reached
    FROM (
        SELECT e.room_nid, e.stream_ordering, e.writer_nid
        FROM events e
        WHERE e.stream_ordering > $9::bigint AND e.stream_ordering <= $8::bigint
            AND NOT e.backfilled AND $9::bigint < $8::bigint
        UNION ALL
        SELECT m.room_nid, m.stream_ordering, m.writer_nid
        FROM own m
        WHERE m.stream_ordering > $9::bigint AND m.stream_ordering <= $8::bigint
            AND $9::bigint < $8::bigint
        UNION ALL  -- a partial state that was completed
        SELECT e.room_nid, o.stream_id, o.writer_nid
        FROM outlier_memberships o
        JOIN events e USING (event_nid)
        WHERE o.stream_id > $9::bigint AND o.stream_id <= $8::bigint
            AND $9::bigint < $8::bigint
    ) AS f
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($10::text[], $11::bigint[]) AS p (instance_name, stream_id)
        USING (instance_name)
    WHERE f.stream_ordering > COALESCE(p.stream_id, $9::bigint)
    GROUP BY f.room_nid
),
known AS MATERIALIZED (
    SELECT o.*, r.room_id, r.room_version, r.completed_at, live.reached,
        COALESCE(o.sent_upto, live.reached) AS known,
        CASE WHEN o.membership = 5 /* JOIN */ THEN 9223372036854775807 ELSE o.stream_ordering END AS upper
    FROM own o
    JOIN rooms r USING (room_nid)
    LEFT JOIN late USING (room_nid)
    CROSS JOIN LATERAL (SELECT COALESCE(late.reached, $8::bigint)) AS live (reached)
),
room AS MATERIALIZED (
    SELECT k.*, start.whole,
        start.whole OR was.membership = 5 /* JOIN */ OR departed.at IS NOT NULL AS is_state_shown,
        CASE WHEN start.whole THEN 0 ELSE COALESCE(GREATEST(has.lower,
            CASE WHEN k.completed_at <= k.known THEN k.completed_at END), 0) END AS lower,
        COALESCE(CASE WHEN k.membership <> 5 /* JOIN */ THEN departed.at END, k.upper) AS state_upper,
        COALESCE(CASE WHEN k.membership IN (1 /* BAN */, 2 /* LEAVE */)
            AND departed.by_event THEN departed.at END,
            k.upper) AS own_upper
    FROM known k
    LEFT JOIN LATERAL (  -- the membership before the first change that the client does not have
        SELECT COALESCE(d.prev_event_nid, 0) AS prev_event_nid
        FROM state_deltas d
        WHERE d.room_nid = k.room_nid AND d.stream_ordering > k.known
            AND d.state_key_nid = k.state_key_nid
        ORDER BY d.stream_ordering
        LIMIT 1
    ) AS delta ON k.stream_ordering > k.known
    LEFT JOIN events old ON old.event_nid = delta.prev_event_nid
    CROSS JOIN LATERAL (SELECT CASE
        WHEN k.stream_ordering <= k.known THEN k.membership ELSE COALESCE(old.membership, 0) END
    ) AS was (membership)
    CROSS JOIN LATERAL (  -- new to the client; or the user was not in it, and is or has been since
        SELECT k.is_new OR was.membership <> 5 /* JOIN */ AND (k.membership = 5 /* JOIN */ OR EXISTS (
            SELECT FROM state_deltas d JOIN events e USING (event_nid)
            WHERE d.room_nid = k.room_nid AND d.stream_ordering > k.known
                AND d.state_key_nid = k.state_key_nid AND e.membership = 5 /* JOIN */
        )) AS whole
        OFFSET 0
    ) AS start
    LEFT JOIN LATERAL (  -- where the user was in the room for the last time
        SELECT d.stream_ordering AS at, d.event_nid IS NOT NULL AS by_event
        FROM state_deltas d
        JOIN events before ON before.event_nid = d.prev_event_nid
        WHERE d.room_nid = k.room_nid AND d.stream_ordering <= k.upper
            AND d.state_key_nid = k.state_key_nid AND before.membership = 5 /* JOIN */
        ORDER BY d.stream_ordering DESC
        LIMIT 1
    ) AS departed ON k.membership <> 5 /* JOIN */
    -- backfilled history may have changed the state. That is no change by itself: it is returned
    -- with the next live event
    LEFT JOIN LATERAL (SELECT e.stream_ordering
        FROM events e
        WHERE (e.room_nid, e.stream_ordering) > (k.room_nid, 0)
            AND (e.room_nid, e.stream_ordering) <= (k.room_nid, k.known)
            AND e.room_nid BETWEEN k.room_nid AND k.room_nid
            AND NOT e.outlier AND NOT e.backfilled
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT 1) AS has (lower) ON NOT start.whole
    WHERE k.is_inside AND k.timeline_limit IS NOT NULL
),
begun AS MATERIALIZED (  -- once a room: otherwise it would be evaluated for each event
    SELECT r.*, first.lower AS first_lower, part.*
    FROM room r
    CROSS JOIN LATERAL (
        SELECT CASE WHEN r.expands THEN 0 ELSE r.lower END AS lower
    ) AS first
    CROSS JOIN LATERAL (
        SELECT (SELECT e.stream_ordering - 1
            FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, first.lower)
                AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND e.after_gap
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT 1) AS gap, (SELECT e.stream_ordering
            FROM (SELECT e.*
                FROM events e
                WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, 0)
                    AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                    AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                    AND NOT e.outlier AND NOT e.backfilled
                ORDER BY e.room_nid DESC, e.stream_ordering DESC
                LIMIT $14::bigint) AS e  -- at most so many are read
            WHERE e.type_nid = ANY(r.bumping) AND e.rejected IS NULL AND NOT e.soft_failed
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT 1) AS bump, EXISTS (
                SELECT
                FROM state_deltas d
                WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
                    AND d.stream_ordering <= r.state_upper
            ) AS has_state
        OFFSET 0
    ) AS part
)
SELECT 'room' AS kind, k.room_nid, k.room_id, k.room_version, k.membership::int AS membership,
    k.member_nid, k.reached, k.stream_ordering AS member_ordering, b.whole, b.is_state_shown,
    b.lower, b.state_upper, b.own_upper, b.gap IS NOT NULL AS after_gap, b.has_state, b.bump,
    NULL::boolean AS is_last, NULL AS event_id, NULL::bigint AS stream_ordering,
        NULL::bigint AS topological_ordering, NULL AS redacted_by, NULL::boolean AS redacted_form,
        NULL::boolean AS withheld, NULL::bytea AS json
FROM known k
LEFT JOIN begun b USING (room_nid)
UNION ALL
SELECT CASE WHEN t.is_shown THEN 'event' ELSE 'limit' END, r.room_nid, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    t.is_last, t.event_id, t.stream_ordering, t.topological_ordering,
        CASE WHEN t.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
            WHERE b.event_nid = t.redacted_by) END,
        t.redacted_form, t.withheld, t.json
FROM begun r
CROSS JOIN LATERAL (SELECT e.*, e.number = $14::bigint AS is_last
    FROM visibility_of(r.room_nid, r.principal_nid) AS v
    CROSS JOIN LATERAL (
        SELECT *
        FROM (SELECT e.room_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.redacted_by,
                e.redacted_form, e.json, row_number() OVER () AS number,
                user_sees(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences, v.shared_before, v.reader_nid, v.unread)
                    AND not_ignored(e, r.ignored) AS is_shown,
                NOT was_there(e, v.joined_since, v.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, v.reader_nid, v.unread) AS withheld
            FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, COALESCE(r.gap, r.first_lower))
                AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND NOT e.outlier AND NOT e.backfilled
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT $14::bigint) AS e  -- at most so many are read
        WHERE e.is_shown OR e.number = $14::bigint
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT r.timeline_limit + 1
    ) AS e) AS t
