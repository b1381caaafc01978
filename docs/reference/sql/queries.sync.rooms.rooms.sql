-- Sent by storage.queries.sync.rooms.rooms. Parameters: $1 user_id text, $2 since bigint, $3 upto
-- bigint, $4 full_state boolean, $5 rooms_max bigint, $6 below_activity bigint, $7 below_room_nid
-- int, $8 timeline_max bigint, $9 least_position bigint, $10 writers text[], $11 writer_positions
-- bigint[], $12 ignored text[], $13 room_nids int[], $14 room_ids text[], $15 not_rooms text[], $16
-- rows_max bigint, $17 types text[], $18 not_types text[], $19 senders text[], $20 not_senders
-- text[], $21 contains_url boolean, $22 include_leave boolean.

WITH
-- More than 150 lines: the rooms that changed and their timelines are of one snapshot. A quiet sync
-- needs no other statement.
reader AS MATERIALIZED (
    SELECT p.principal_nid, k.state_key_nid
    FROM principals p
    LEFT JOIN state_keys k ON k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = p.name
    WHERE p.name = $1::text
),
filter AS MATERIALIZED (
    SELECT f.*, ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE($12::text[], ARRAY(
        -- clients can store anything there, also the one character that jsonb cannot have
        SELECT jsonb_path_query(replace(convert_from(d.content, 'UTF8'), '\u0000', '\ufffd')::jsonb,
            '$.ignored_users.keyvalue().key', silent => true) #>> ARRAY[]::text[]
        FROM principals p
        CROSS JOIN event_types t
        JOIN account_data d ON d.principal_nid = p.principal_nid AND d.room_nid = 0
            AND d.type_nid = t.type_nid
        WHERE p.name = $1::text AND t.type = 'm.ignored_user_list'
    )))) AS ignored
    FROM filter_of($17::text[], $18::text[], $19::text[], $20::text[], $21::boolean) AS f
),
named AS MATERIALIZED (  -- the rooms to read, by number, by id, or by both; NULL for all
    SELECT CASE
        WHEN $14::text[] IS NULL THEN $13::int[]
        ELSE ARRAY(SELECT room_nid FROM rooms
            WHERE room_id = ANY($14::text[]) AND ($13::int[] IS NULL OR room_nid = ANY($13::int[])))
    END AS room_nids
),
own AS NOT MATERIALIZED (  -- the memberships of the user: of all rooms, or of the named ones
    SELECT m.*, u.state_key_nid
    FROM reader u
    JOIN memberships m USING (principal_nid)
    WHERE (SELECT room_nids FROM named) IS NULL
    UNION ALL
    SELECT m.*, u.state_key_nid
    FROM reader u
    CROSS JOIN unnest((SELECT room_nids FROM named)) AS n (room_nid)
    -- room by room: otherwise all memberships of the user would be read for a few of them
    CROSS JOIN LATERAL (
        SELECT * FROM memberships
            WHERE principal_nid = u.principal_nid AND room_nid = n.room_nid OFFSET 0
    ) AS m
),
-- rooms with an event at or below the furthest position of the token that the token does not
-- cover: its writer was behind
late AS MATERIALIZED (
    SELECT f.room_nid, min(f.stream_ordering) - 1 AS reached
    FROM (
        SELECT e.room_nid, e.stream_ordering, e.writer_nid
        FROM events e
        WHERE e.stream_ordering > $9::bigint AND e.stream_ordering <= COALESCE($2::bigint, $3::bigint)
            AND NOT e.backfilled AND $9::bigint < COALESCE($2::bigint, $3::bigint)
        UNION ALL
        SELECT m.room_nid, m.stream_ordering, m.writer_nid
        FROM own m
        WHERE m.stream_ordering > $9::bigint AND m.stream_ordering <= COALESCE($2::bigint, $3::bigint)
            AND $9::bigint < COALESCE($2::bigint, $3::bigint)
        UNION ALL  -- a partial state that was completed
        SELECT e.room_nid, o.stream_id, o.writer_nid
        FROM outlier_memberships o
        JOIN events e USING (event_nid)
        WHERE o.stream_id > $9::bigint AND o.stream_id <= COALESCE($2::bigint, $3::bigint)
            AND $9::bigint < COALESCE($2::bigint, $3::bigint)
    ) AS f
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($10::text[], $11::bigint[]) AS p (instance_name, stream_id)
        USING (instance_name)
    WHERE f.stream_ordering > COALESCE(p.stream_id, $9::bigint)
    GROUP BY f.room_nid
),
-- rooms of the user with new events, and the membership before those (0: none)
mine AS (
    SELECT m.room_nid, m.event_nid AS member_nid, m.principal_nid, m.state_key_nid, r.room_id,
        r.room_version,
        r.last_stream_ordering, r.completed_at, m.membership,
        m.forgotten AND m.membership < 3 /* KNOCK */ AS is_forgotten,
        m.stream_ordering > token.reached AS is_changed,
        CASE WHEN m.stream_ordering <= token.reached THEN m.membership
            ELSE COALESCE(old.membership, 0) END AS membership_then,
        delta.prev_event_nid AS member_nid_then,
        old_leave.is_wanted AS is_old_leave, m.stream_ordering AS member_stream,
        CASE WHEN $2::bigint IS NOT NULL THEN token.reached END AS since,
        CASE WHEN $2::bigint IS NULL THEN token.reached ELSE $3::bigint END AS upto
    FROM own m
    JOIN rooms r USING (room_nid)
    LEFT JOIN late USING (room_nid)
    CROSS JOIN LATERAL (SELECT COALESCE(late.reached, $2::bigint, $3::bigint)) AS token (reached)
    -- rooms that were left before the position, on request: of a first sync, or with full_state
    CROSS JOIN LATERAL (
        SELECT $22::boolean AND ($2::bigint IS NULL OR $4::boolean) AND NOT m.forgotten
            AND m.membership IN (1 /* BAN */, 2 /* LEAVE */) AND m.stream_ordering <= token.reached
    ) AS old_leave (is_wanted)
    LEFT JOIN LATERAL (
        SELECT COALESCE(d.prev_event_nid, 0) AS prev_event_nid
        FROM state_deltas d
        WHERE d.room_nid = m.room_nid AND d.stream_ordering > token.reached
            AND d.state_key_nid = m.state_key_nid
        ORDER BY d.stream_ordering
        LIMIT 1
    ) delta ON m.stream_ordering > token.reached
    LEFT JOIN events old ON old.event_nid = delta.prev_event_nid
    WHERE r.room_id <> ALL($15::text[]) AND CASE
        WHEN old_leave.is_wanted THEN true
        WHEN $2::bigint IS NULL THEN m.membership IN (3 /* KNOCK */, 4 /* INVITE */, 5 /* JOIN */)
        ELSE m.stream_ordering > token.reached
            OR (m.membership = 5 /* JOIN */ AND (r.last_stream_ordering > token.reached
            OR $4::boolean)) END
        -- of a forgotten room the leave alone, for a client that has the room
        AND NOT (m.forgotten AND m.membership < 3 /* KNOCK */
            AND COALESCE(delta.prev_event_nid = 0 OR old.membership < 3 /* KNOCK */, $2::bigint IS NULL))
),
-- all joined rooms, or the next part of an initial sync: latest activity at its position first
joined AS (
    SELECT mine.*, latest.activity
    FROM mine
    CROSS JOIN LATERAL (
        SELECT CASE WHEN mine.last_stream_ordering <= mine.upto THEN mine.last_stream_ordering
            ELSE (SELECT e.stream_ordering
                FROM events e
                WHERE (e.room_nid, e.stream_ordering) > (mine.room_nid, 0)
                    AND (e.room_nid, e.stream_ordering) <= (mine.room_nid, mine.upto)
                    AND e.room_nid BETWEEN mine.room_nid AND mine.room_nid
                    AND NOT e.outlier AND NOT e.backfilled
                ORDER BY e.room_nid DESC, e.stream_ordering DESC
                LIMIT 1) END
    ) AS latest (activity)
    WHERE mine.membership = 5 /* JOIN */
        AND (mine.since IS NOT NULL OR NOT mine.is_changed OR mine.membership_then = 5 /* JOIN */)
        AND ($6::bigint IS NULL
            OR (latest.activity, mine.room_nid) < ($6::bigint, $7::int))
    ORDER BY latest.activity DESC, mine.room_nid DESC
    LIMIT $5::bigint
),
room AS (  -- for each room, whether it is returned whole, and the range of the stream
    SELECT joined.*, since IS NULL OR $4::boolean OR membership_then <> 5 /* JOIN */ AS whole,
        true AS was_joined,
        CASE WHEN membership_then = 5 /* JOIN */ THEN COALESCE(GREATEST(live.after,
            CASE WHEN completed_at <= since THEN completed_at END), since, 0) ELSE 0 END AS lower,
            upto AS upper
    FROM joined
    -- backfilled history may have changed the state. That is no change by itself: it is returned
    -- with the next live event
    LEFT JOIN LATERAL (SELECT e.stream_ordering
        FROM events e
        WHERE (e.room_nid, e.stream_ordering) > (joined.room_nid, 0)
            AND (e.room_nid, e.stream_ordering) <= (joined.room_nid, joined.since)
            AND e.room_nid BETWEEN joined.room_nid AND joined.room_nid
            AND NOT e.outlier AND NOT e.backfilled
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT 1) AS live (after) ON true
    UNION ALL
    SELECT mine.*, mine.last_stream_ordering, visit.whole OR stay.ended IS NOT NULL,
        -- of a forgotten room the client gets the leave alone, and no state
        (visit.whole OR stay.ended IS NOT NULL OR membership_then = 5 /* JOIN */)
            AND NOT mine.is_forgotten,
        CASE WHEN visit.whole THEN 0 ELSE COALESCE(mine.since, 0) END,
        CASE WHEN stay.ended IS NOT NULL THEN stay.ended
            WHEN mine.is_old_leave THEN mine.member_stream
            WHEN member.stream_ordering > mine.since THEN member.stream_ordering ELSE mine.upto END
    FROM mine
    CROSS JOIN filter
    LEFT JOIN events member ON member.event_nid = mine.member_nid
    -- joined and left since the last sync: the client has no state of the room. The same of a user
    -- who never joined (shared_before), if they could see the room at their last membership
    CROSS JOIN LATERAL (
        SELECT membership_then <> 5 /* JOIN */ AND (EXISTS (
            SELECT FROM state_deltas d JOIN events e USING (event_nid)
            WHERE d.room_nid = mine.room_nid AND d.stream_ordering > mine.since
                AND d.state_key_nid = mine.state_key_nid AND e.membership = 5 /* JOIN */
        ) OR (mine.membership < 3 /* KNOCK */ AND NOT mine.is_forgotten AND (
            SELECT v.shared_before IS NULL AND user_sees(member, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences, v.shared_before, v.reader_nid, v.unread)
            FROM visibility_of(mine.room_nid, mine.principal_nid) AS v
        ))) AS whole
        OFFSET 0
    ) AS visit
    -- where an old leave ended the last stay: a later invite or ban does not show more of the room
    LEFT JOIN LATERAL (
        SELECT d.stream_ordering AS ended
        FROM state_deltas d
        WHERE d.room_nid = mine.room_nid AND d.stream_ordering <= mine.member_stream
            AND d.state_key_nid = mine.state_key_nid
            AND (SELECT e.membership = 5 /* JOIN */ FROM events e WHERE e.event_nid = d.prev_event_nid)
            AND EXISTS (
                SELECT
                FROM visibility v
                WHERE v.room_nid = mine.room_nid AND v.principal_nid = mine.principal_nid
                    AND v.last_join_topological IS NOT NULL
            )
        ORDER BY d.stream_ordering DESC
        LIMIT 1
    ) AS stay ON mine.is_old_leave
    WHERE mine.membership <> 5 /* JOIN */ AND mine.member_nid IS DISTINCT FROM mine.member_nid_then
        AND $6::bigint IS NULL
        -- a client that was not in the room has no state of it to return in full
        AND NOT (mine.is_old_leave AND mine.since IS NOT NULL AND stay.ended IS NULL)
        -- not an invite by an ignored user
        AND NOT (mine.membership = 4 /* INVITE */
        AND COALESCE(member.sender_nid = ANY(filter.ignored), false))
),
begun AS MATERIALIZED (  -- once a room: otherwise it would be evaluated for each event
    SELECT r.*, start.gap, start.has_state
    FROM room r
    -- events before the last gap are left out: with them the client would not see the gap
    CROSS JOIN LATERAL (
        SELECT (SELECT e.stream_ordering - 1
            FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, r.lower)
                AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND e.after_gap
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT 1) AS gap, r.whole OR EXISTS (
                SELECT
                FROM state_deltas d
                WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
                    AND d.stream_ordering <= r.upper
            ) AS has_state
        OFFSET 0
    ) AS start
)
SELECT 'room' AS kind, r.room_nid, r.room_id, r.room_version, r.membership, r.member_nid,
    r.state_key_nid AS member_key_nid, r.whole, r.was_joined, r.lower, r.upper,
    r.activity, r.gap IS NOT NULL AS after_gap, r.has_state,
    NULL::boolean AS is_last, NULL AS event_id, NULL::bigint AS stream_ordering,
        NULL::bigint AS topological_ordering, NULL AS redacted_by, NULL::boolean AS redacted_form,
        NULL::boolean AS withheld, NULL::bytea AS json
FROM begun r
UNION ALL
SELECT CASE WHEN t.is_shown THEN 'event' ELSE 'limit' END, r.room_nid, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    t.is_last, t.event_id, t.stream_ordering, t.topological_ordering,
        CASE WHEN t.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
            WHERE b.event_nid = t.redacted_by) END,
        t.redacted_form, t.withheld, t.json
FROM begun r
CROSS JOIN LATERAL (SELECT e.*, e.number = $16::bigint AS is_last
    FROM visibility_of(r.room_nid, r.principal_nid) AS v
    CROSS JOIN filter
    CROSS JOIN LATERAL (
        SELECT *
        FROM (SELECT e.room_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.redacted_by,
                e.redacted_form, e.json, row_number() OVER () AS number,
                user_sees(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences, v.shared_before, v.reader_nid, v.unread)
                    AND not_ignored(e, filter.ignored)
                            AND is_wanted(e, filter.types, filter.not_types, filter.senders, filter.not_senders,
                                filter.contains_url) AS is_shown,
                NOT was_there(e, v.joined_since, v.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, v.reader_nid, v.unread) AS withheld
            FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, COALESCE(r.gap, r.lower))
                AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND NOT e.outlier AND NOT e.backfilled
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT $16::bigint) AS e  -- at most so many are read
        WHERE e.is_shown OR e.number = $16::bigint
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT $8::bigint + 1
    ) AS e) AS t
WHERE r.membership NOT IN (3 /* KNOCK */, 4 /* INVITE */)
