-- Sent by storage.persist.write.all_tables.bound. Parameters: $1 to $1 lock (room_nid), $2 to $5
-- placed (event_nid, room_nid, backfilled, event_id), $6 to $10 set_state (event_nid, room_nid,
-- state_key_nid, membership, is_new), $11 to $20 old_room (write_version, room_nid, next_audience,
-- current_state_group, max_topological_ordering, current_audience, removals, forward_extremities,
-- out_of_range, in_order_ts), $21 to $23 new_state_key (state_key_nid, type_nid, state_key), $24 to
-- $25 new_principal (principal_nid, name), $26 received_ts bigint, $27 writer_nid smallint, $28 to
-- $64 new_event (event_nid, topological_ordering, depth, origin_server_ts, state_group_before,
-- state_group_after, audience, redacted_by, relates_to, room_nid, sender_nid, type_nid,
-- state_key_nid, rel_type_nid, membership, outlier, backfilled, soft_failed, redacted_form,
-- ineffective, replaces, has_url, after_gap, event_id, rejected, prev_events, auth_events, json,
-- superseded, refused, prev_distance, auth_distance_1, auth_distance_2, auth_distance_3,
-- auth_distance_4, describes_room, in_order_ts), $65 to $79 new_group (state_group, digest,
-- audience, room_nid, entry_count, runs, back, key_nids, event_nids, member_key_nids,
-- member_event_nids, key_nid, member_key_nid, event_nid, path), $80 to $84 new_delta (event_nid,
-- prev_event_nid, room_nid, state_key_nid, cause_nid), $85 to $90 set_membership (event_nid,
-- principal_nid, room_nid, membership, cause_nid, entered), $91 to $99 set_visibility
-- (last_join_topological, room_nid, principal_nid, joined_count, invited_count, audiences,
-- invited_audiences, first_audience, is_new), $100 to $105 set_audience (audience,
-- opened_topological, room_nid, branches, continued, is_new), $106 to $112 new_chain_position
-- (event_nid, chain_nid, sequence_number, event_id, state_key, link_1, link_2), $113 to $116
-- new_link (chain_nid, target_chain_nid, sequence_number, target_sequence_number), $117 to $122
-- new_transaction (event_nid, room_nid, sender_nid, device_id, transaction_id, event_id), $123
-- instance_name text, $124 epoch int, $125 to $127 dependencies (timeline_nids, stored_nids,
-- state_groups), $128 to $129 target (event_id, room_nid).

WITH
-- More than 150 lines: the parts of the write that one new state event needs.
locked AS MATERIALIZED (  -- in a fixed order, so that two writers never wait for each other
    SELECT room_nid, pg_advisory_xact_lock(1919905645 /* LOCK_ROOM */, room_nid)
    FROM (SELECT unnest(ARRAY[$1::int]) AS room_nid ORDER BY 1) AS ordered
),
positioned AS MATERIALIZED (  -- after the locks, as late as can be
    SELECT input.event_nid, input.room_nid, input.backfilled,
        nextval('events_stream') AS stream_ordering
    FROM (
        SELECT event_nid, room_nid, backfilled
        FROM (SELECT $2::bigint AS event_nid, $3::int AS room_nid, $4::boolean AS backfilled, 1 AS ordinal) AS i
        WHERE (SELECT count(*) FROM locked) >= 0
        ORDER BY ordinal
    ) AS input
),
counted AS (  -- how the members of the current states change in number
    SELECT i.room_nid,
        (count(*) FILTER (WHERE i.membership = 5 /* JOIN */)
            - count(*) FILTER (WHERE c.membership = 5 /* JOIN */))::int AS joined,
        (count(*) FILTER (WHERE i.membership = 4 /* INVITE */)
            - count(*) FILTER (WHERE c.membership = 4 /* INVITE */))::int AS invited
    FROM (
        SELECT i.room_nid, i.state_key_nid, i.membership
        FROM (SELECT $7::int AS room_nid, $8::int AS state_key_nid, $9::smallint AS membership) AS i
    ) AS i
    LEFT JOIN LATERAL (
        SELECT membership FROM current_state
        WHERE room_nid = i.room_nid AND state_key_nid = i.state_key_nid
        OFFSET 0
    ) AS c ON true
    GROUP BY i.room_nid
),
old_room AS (  -- the compare-and-set
    UPDATE rooms r
    SET write_version = r.write_version + 1,
        next_audience = i.next_audience,
        current_state_group = i.current_state_group,
        last_stream_ordering = COALESCE(
            (SELECT max(p.stream_ordering) FROM positioned p
                WHERE p.room_nid = i.room_nid AND NOT p.backfilled),
            r.last_stream_ordering
        ),
        max_topological_ordering = i.max_topological_ordering,
        forward_extremities = i.forward_extremities::bigint[],
        current_audience = i.current_audience,
        out_of_range = i.out_of_range::int8multirange,
        in_order_ts = i.in_order_ts,
        joined_count = r.joined_count
            + COALESCE((SELECT c.joined FROM counted c WHERE c.room_nid = i.room_nid), 0),
        invited_count = r.invited_count
            + COALESCE((SELECT c.invited FROM counted c WHERE c.room_nid = i.room_nid), 0),
        moves = r.moves
    FROM (SELECT $11::bigint AS write_version, $12::int AS room_nid, $13::bigint AS next_audience, $14::bigint AS current_state_group, $15::bigint AS max_topological_ordering, $16::bigint AS current_audience, $17::bigint AS removals, $18::bigint[] AS forward_extremities, $19::text AS out_of_range, $20::bigint AS in_order_ts) AS i
    JOIN locked USING (room_nid)
    WHERE r.room_nid = i.room_nid AND r.write_version = i.write_version
    RETURNING r.room_nid, r.moves, r.removals <> i.removals AS has_lost
),
new_state_key AS (
    INSERT INTO state_keys (state_key_nid, type_nid, state_key)
    SELECT * FROM (SELECT unnest($21::text::int[]) AS state_key_nid, unnest($22::text::int[]) AS type_nid, unnest($23::text::text[]) AS state_key WHERE $21::text <> '{}') AS i
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT * FROM (SELECT unnest($24::text::int[]) AS principal_nid, unnest($25::text::text[]) AS name WHERE $24::text <> '{}') AS i
),
new_event AS (
    INSERT INTO events (event_nid, topological_ordering, depth, origin_server_ts, state_group_before, state_group_after, audience, redacted_by, relates_to, room_nid, sender_nid, type_nid, state_key_nid, rel_type_nid, membership, outlier, backfilled, soft_failed, redacted_form, ineffective, replaces, has_url, after_gap, event_id, rejected, prev_events, auth_events, json, superseded, refused, prev_distance, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4, describes_room, in_order_ts, stream_ordering, received_ts, encoding, writer_nid)
    SELECT i.event_nid, i.topological_ordering, i.depth, i.origin_server_ts, i.state_group_before, i.state_group_after, i.audience, i.redacted_by, i.relates_to, i.room_nid, i.sender_nid, i.type_nid, i.state_key_nid, i.rel_type_nid, i.membership, i.outlier, i.backfilled, i.soft_failed, i.redacted_form, i.ineffective, i.replaces, i.has_url, i.after_gap, i.event_id, i.rejected, i.prev_events::bigint[], i.auth_events::bigint[], i.json, i.superseded, i.refused, i.prev_distance, i.auth_distance_1, i.auth_distance_2, i.auth_distance_3, i.auth_distance_4, i.describes_room, i.in_order_ts, p.stream_ordering, $26::bigint, 0, $27::smallint
    FROM (SELECT $28::bigint AS event_nid, $29::bigint AS topological_ordering, $30::bigint AS depth, $31::bigint AS origin_server_ts, $32::bigint AS state_group_before, $33::bigint AS state_group_after, $34::bigint AS audience, $35::bigint AS redacted_by, $36::bigint AS relates_to, $37::int AS room_nid, $38::int AS sender_nid, $39::int AS type_nid, $40::int AS state_key_nid, $41::int AS rel_type_nid, $42::smallint AS membership, $43::boolean AS outlier, $44::boolean AS backfilled, $45::boolean AS soft_failed, $46::boolean AS redacted_form, $47::boolean AS ineffective, $48::boolean AS replaces, $49::boolean AS has_url, $50::boolean AS after_gap, $51::text AS event_id, $52::text AS rejected, $53::bigint[] AS prev_events, $54::bigint[] AS auth_events, $55::bytea AS json, $56::boolean AS superseded, $57::text AS refused, $58::int AS prev_distance, $59::int AS auth_distance_1, $60::int AS auth_distance_2, $61::int AS auth_distance_3, $62::int AS auth_distance_4, $63::boolean AS describes_room, $64::bigint AS in_order_ts) AS i
    LEFT JOIN positioned p USING (event_nid)
),
new_group AS (
    INSERT INTO state_groups (state_group, digest, audience, room_nid, entry_count, runs, back, key_nids, event_nids, member_key_nids, member_event_nids, key_nid, member_key_nid, event_nid, path)
    SELECT i.state_group, i.digest, i.audience, i.room_nid, i.entry_count, i.runs, i.back::int[], i.key_nids::int[], i.event_nids::bigint[], i.member_key_nids::int[], i.member_event_nids::bigint[], i.key_nid, i.member_key_nid, i.event_nid, i.path
    FROM (SELECT $65::bigint AS state_group, $66::bigint AS digest, $67::bigint AS audience, $68::int AS room_nid, $69::int AS entry_count, $70::int AS runs, $71::int[] AS back, $72::int[] AS key_nids, $73::bigint[] AS event_nids, $74::int[] AS member_key_nids, $75::bigint[] AS member_event_nids, $76::int AS key_nid, $77::int AS member_key_nid, $78::bigint AS event_nid, $79::bytea AS path) AS i
),
new_state AS (
    INSERT INTO current_state (event_nid, room_nid, state_key_nid, membership)
    SELECT i.event_nid, i.room_nid, i.state_key_nid, i.membership
    FROM (SELECT $6::bigint AS event_nid, $7::int AS room_nid, $8::int AS state_key_nid, $9::smallint AS membership, $10::boolean AS is_new) AS i
    WHERE i.is_new
),
set_state AS (
    INSERT INTO current_state (event_nid, room_nid, state_key_nid, membership)
    SELECT i.event_nid, i.room_nid, i.state_key_nid, i.membership
    FROM (SELECT $6::bigint AS event_nid, $7::int AS room_nid, $8::int AS state_key_nid, $9::smallint AS membership, $10::boolean AS is_new) AS i
    WHERE NOT i.is_new
    ON CONFLICT (room_nid, state_key_nid) DO UPDATE SET event_nid = EXCLUDED.event_nid, membership = EXCLUDED.membership
),
new_delta AS (
    INSERT INTO state_deltas (event_nid, prev_event_nid, room_nid, state_key_nid, stream_ordering, writer_nid)
    SELECT i.event_nid, i.prev_event_nid, i.room_nid, i.state_key_nid, p.stream_ordering, $27::smallint
    FROM (SELECT $80::bigint AS event_nid, $81::bigint AS prev_event_nid, $82::int AS room_nid, $83::int AS state_key_nid, $84::bigint AS cause_nid) AS i
    JOIN positioned p ON p.event_nid = i.cause_nid
),
set_membership AS (
    INSERT INTO memberships (event_nid, principal_nid, room_nid, membership, stream_ordering, writer_nid)
    SELECT i.event_nid, i.principal_nid, i.room_nid, i.membership, p.stream_ordering, $27::smallint
    FROM (SELECT unnest($85::text::bigint[]) AS event_nid, unnest($86::text::int[]) AS principal_nid, unnest($87::text::int[]) AS room_nid, unnest($88::text::smallint[]) AS membership, unnest($89::text::bigint[]) AS cause_nid WHERE $86::text <> '{}') AS i
    LEFT JOIN positioned p ON p.event_nid = i.cause_nid
    ON CONFLICT (principal_nid, room_nid) DO UPDATE
        SET event_nid = EXCLUDED.event_nid, membership = EXCLUDED.membership,
            stream_ordering = EXCLUDED.stream_ordering,
            writer_nid = EXCLUDED.writer_nid,
            -- until a join, an invite or a knock; code that does not know the column keeps it
            forgotten = memberships.forgotten AND memberships.membership < 3 /* KNOCK */
                AND EXCLUDED.membership < 3 /* KNOCK */ AND NOT EXISTS (
                    SELECT FROM (SELECT unnest($86::text::int[]) AS principal_nid, unnest($87::text::int[]) AS room_nid, unnest($90::text::boolean[]) AS entered WHERE $86::text <> '{}') AS a
                    WHERE a.entered AND a.principal_nid = EXCLUDED.principal_nid
                        AND a.room_nid = EXCLUDED.room_nid
                )
),
overruled AS (
    DELETE FROM out_of_band_memberships o
    USING (SELECT unnest($86::text::int[]) AS principal_nid, unnest($87::text::int[]) AS room_nid, unnest($89::text::bigint[]) AS cause_nid WHERE $86::text <> '{}') AS i
    WHERE o.room_nid = i.room_nid AND o.principal_nid = i.principal_nid AND i.cause_nid IS NOT NULL
),
new_visibility AS (
    INSERT INTO visibility (last_join_topological, room_nid, principal_nid, joined_count, invited_count, audiences, invited_audiences, first_audience)
    SELECT i.last_join_topological, i.room_nid, i.principal_nid, i.joined_count, i.invited_count, i.audiences::int8multirange, i.invited_audiences::int8multirange, i.first_audience
    FROM (SELECT unnest($91::text::bigint[]) AS last_join_topological, unnest($92::text::int[]) AS room_nid, unnest($93::text::int[]) AS principal_nid, unnest($94::text::int[]) AS joined_count, unnest($95::text::int[]) AS invited_count, unnest($96::text::text[]) AS audiences, unnest($97::text::text[]) AS invited_audiences, unnest($98::text::bigint[]) AS first_audience, unnest($99::text::boolean[]) AS is_new WHERE $92::text <> '{}') AS i
    WHERE i.is_new
),
set_visibility AS (  -- a purge may have deleted the row
    INSERT INTO visibility (last_join_topological, room_nid, principal_nid, joined_count, invited_count, audiences, invited_audiences, first_audience)
    SELECT i.last_join_topological, i.room_nid, i.principal_nid, i.joined_count, i.invited_count, i.audiences::int8multirange, i.invited_audiences::int8multirange, i.first_audience
    FROM (SELECT unnest($91::text::bigint[]) AS last_join_topological, unnest($92::text::int[]) AS room_nid, unnest($93::text::int[]) AS principal_nid, unnest($94::text::int[]) AS joined_count, unnest($95::text::int[]) AS invited_count, unnest($96::text::text[]) AS audiences, unnest($97::text::text[]) AS invited_audiences, unnest($98::text::bigint[]) AS first_audience, unnest($99::text::boolean[]) AS is_new WHERE $92::text <> '{}') AS i
    WHERE NOT i.is_new
    ON CONFLICT (room_nid, principal_nid) DO UPDATE SET last_join_topological = EXCLUDED.last_join_topological, joined_count = EXCLUDED.joined_count, invited_count = EXCLUDED.invited_count, audiences = EXCLUDED.audiences::int8multirange, invited_audiences = EXCLUDED.invited_audiences::int8multirange, first_audience = EXCLUDED.first_audience
),
new_audience AS (
    INSERT INTO audiences (audience, opened_topological, room_nid, branches, continued)
    SELECT i.audience, i.opened_topological, i.room_nid, i.branches, i.continued
    FROM (SELECT unnest($100::text::bigint[]) AS audience, unnest($101::text::bigint[]) AS opened_topological, unnest($102::text::int[]) AS room_nid, unnest($103::text::int[]) AS branches, unnest($104::text::boolean[]) AS continued, unnest($105::text::boolean[]) AS is_new WHERE $100::text <> '{}') AS i
    WHERE i.is_new
),
set_audience AS (
    INSERT INTO audiences (audience, opened_topological, room_nid, branches, continued)
    SELECT i.audience, i.opened_topological, i.room_nid, i.branches, i.continued
    FROM (SELECT unnest($100::text::bigint[]) AS audience, unnest($101::text::bigint[]) AS opened_topological, unnest($102::text::int[]) AS room_nid, unnest($103::text::int[]) AS branches, unnest($104::text::boolean[]) AS continued, unnest($105::text::boolean[]) AS is_new WHERE $100::text <> '{}') AS i
    WHERE NOT i.is_new
    ON CONFLICT (room_nid, audience)
        DO UPDATE SET branches = EXCLUDED.branches, continued = EXCLUDED.continued
),
new_chain_position AS (
    INSERT INTO auth_chains (event_nid, chain_nid, sequence_number, event_id, state_key, link_1, link_2)
    SELECT * FROM (SELECT $106::bigint AS event_nid, $107::bigint AS chain_nid, $108::int AS sequence_number, $109::text AS event_id, $110::text AS state_key, $111::bigint AS link_1, $112::bigint AS link_2) AS i
),
new_link AS (
    INSERT INTO auth_chain_links (chain_nid, target_chain_nid, sequence_number, target_sequence_number)
    SELECT * FROM (SELECT unnest($113::text::bigint[]) AS chain_nid, unnest($114::text::bigint[]) AS target_chain_nid, unnest($115::text::int[]) AS sequence_number, unnest($116::text::int[]) AS target_sequence_number WHERE $113::text <> '{}') AS i
),
new_transaction AS (  -- refused by the primary key if another process has stored the request
    INSERT INTO local_transactions (event_nid, room_nid, sender_nid, device_id, transaction_id, event_id, sent_ts)
    SELECT i.event_nid, i.room_nid, i.sender_nid, i.device_id, i.transaction_id, i.event_id, $26::bigint
    FROM (SELECT unnest($117::text::bigint[]) AS event_nid, unnest($118::text::int[]) AS room_nid, unnest($119::text::int[]) AS sender_nid, unnest($120::text::text[]) AS device_id, unnest($121::text::text[]) AS transaction_id, unnest($122::text::text[]) AS event_id WHERE $118::text <> '{}') AS i
),
latest AS (  -- the positions this write takes, per stream
    SELECT CASE WHEN backfilled THEN 'backfill' ELSE 'events' END AS stream_name,
        max(stream_ordering) AS stream_id
    FROM positioned
    GROUP BY 1
),
set_position AS (
    INSERT INTO stream_positions (stream_name, instance_name, stream_id)
    SELECT stream_name, $123::text, max(stream_id) FROM latest GROUP BY 1
    ON CONFLICT (stream_name, instance_name)
        DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
    WHERE stream_positions.epoch = $124::int
    RETURNING stream_name
)
SELECT p.event_nid, p.stream_ordering, NULL::bigint AS invalidation_id, NULL::int AS writers,
    NULL::bigint AS stale
FROM positioned p
UNION ALL
SELECT NULL, NULL, NULL,
    (SELECT count(*)::int FROM stream_positions WHERE stream_name = 'events'),
    CASE
        WHEN (SELECT count(*) FROM old_room) <> cardinality(ARRAY[$12::int])
            THEN refuse_stale_plan('rooms')
        WHEN EXISTS (  -- stored before this statement, as its snapshot shows
            SELECT FROM (SELECT unnest(ARRAY[$51::text]) AS id) AS one
            CROSS JOIN LATERAL (SELECT FROM events WHERE event_id = one.id OFFSET 0) AS e
        ) THEN refuse_stale_plan('events')
        WHEN EXISTS (SELECT FROM old_room WHERE has_lost) AND dependencies_purged(
            $125::text::bigint[], $126::text::bigint[], $127::text::bigint[],
            ARRAY[$5::text] || ARRAY[$51::text],
            ARRAY[$2::bigint] || ARRAY[$28::bigint],
            '{}'
        ) THEN refuse_stale_plan('removals')
        WHEN EXISTS (SELECT FROM missing_events WHERE event_id = ANY(ARRAY[$5::text])) THEN refuse_stale_plan('missing_events')
        WHEN EXISTS (SELECT FROM waiting_redactions w
        WHERE w.target_event_id = ANY(ARRAY[$128::text])
            AND EXISTS (SELECT FROM (SELECT $128::text AS event_id, $129::int AS room_nid) AS t WHERE t.room_nid = w.room_nid)) THEN refuse_stale_plan('waiting_redactions')
        WHEN EXISTS (
            SELECT FROM latest WHERE stream_name NOT IN (SELECT stream_name FROM set_position)
        ) THEN refuse_old_writer($123::text)
    END
