-- Sent by storage.persist.write.all_tables.bound. Parameters: $1 to $1 lock (room_nid), $2 to $5
-- placed (event_nid, room_nid, backfilled, event_id), $6 to $10 set_state (event_nid, room_nid,
-- state_key_nid, membership, is_new), $11 to $12 removed_state (room_nid, state_key_nid), $13 to
-- $22 new_room (room_nid, next_audience, current_state_group, max_topological_ordering,
-- current_audience, room_id, room_version, forward_extremities, out_of_range, in_order_ts), $23 to
-- $25 reordered (event_nid, topological_before, room_nid), $26 to $35 old_room (write_version,
-- room_nid, next_audience, current_state_group, max_topological_ordering, current_audience,
-- removals, forward_extremities, out_of_range, in_order_ts), $36 to $37 new_type (type_nid, type),
-- $38 to $40 new_state_key (state_key_nid, type_nid, state_key), $41 to $42 new_principal
-- (principal_nid, name), $43 received_ts bigint, $44 writer_nid smallint, $45 to $81 new_event
-- (event_nid, topological_ordering, depth, origin_server_ts, state_group_before, state_group_after,
-- audience, redacted_by, relates_to, room_nid, sender_nid, type_nid, state_key_nid, rel_type_nid,
-- membership, outlier, backfilled, soft_failed, redacted_form, ineffective, replaces, has_url,
-- after_gap, event_id, rejected, prev_events, auth_events, json, superseded, refused,
-- prev_distance, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4,
-- describes_room, in_order_ts), $82 to $106 changed_event (event_nid, topological_ordering, depth,
-- state_group_before, state_group_after, audience, redacted_by, outlier, backfilled, soft_failed,
-- ineffective, superseded, rejected, refused, prev_events, prev_distance, after_gap, in_order_ts,
-- auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4, authorised,
-- readmitted), $107 to $111 new_gap (event_nid, room_nid, superseded, event_id, child_nids), $112
-- to $126 new_group (state_group, digest, audience, room_nid, entry_count, runs, back, key_nids,
-- event_nids, member_key_nids, member_event_nids, key_nid, member_key_nid, event_nid, path), $127
-- to $131 new_delta (event_nid, prev_event_nid, room_nid, state_key_nid, cause_nid), $132 to $135
-- out_of_band (event_nid, principal_nid, room_nid, stripped_state), $136 to $141 set_membership
-- (event_nid, principal_nid, room_nid, membership, cause_nid, entered), $142 to $150 set_visibility
-- (last_join_topological, room_nid, principal_nid, joined_count, invited_count, audiences,
-- invited_audiences, first_audience, is_new), $151 to $156 set_audience (audience,
-- opened_topological, room_nid, branches, continued, is_new), $157 to $163 set_past
-- (first_audience, opened_topological, room_nid, principal_nid, audiences, invited_audiences,
-- topological_ranges), $164 to $166 new_waiting (redaction_nid, room_nid, target_event_id), $167 to
-- $168 target (event_id, room_nid), $169 to $175 new_chain_position (event_nid, chain_nid,
-- sequence_number, event_id, state_key, link_1, link_2), $176 to $179 new_link (chain_nid,
-- target_chain_nid, sequence_number, target_sequence_number), $180 to $181 dropped (event_nid,
-- room_nid), $182 to $187 new_transaction (event_nid, room_nid, sender_nid, device_id,
-- transaction_id, event_id), $188 to $189 new_invalidation (cache_name, keys_json), $190
-- instance_name text, $191 epoch int, $192 to $194 dependencies (timeline_nids, stored_nids,
-- state_groups), $195 to $195 settled (redaction_nid), $196 to $196 filled_gap (event_nid).

WITH
-- More than 150 lines: all tables of an append in one round trip. Its checks for a stale
        -- plan need the snapshot from before the write.
locked AS MATERIALIZED (  -- in a fixed order, so that two writers never wait for each other
    SELECT room_nid, pg_advisory_xact_lock(1919905645 /* LOCK_ROOM */, room_nid)
    FROM (SELECT unnest($1::text::int[]) AS room_nid ORDER BY 1) AS ordered
),
positioned AS MATERIALIZED (  -- after the locks, as late as can be
    SELECT input.event_nid, input.room_nid, input.backfilled,
        nextval('events_stream') AS stream_ordering
    FROM (
        SELECT event_nid, room_nid, backfilled
        FROM (SELECT unnest($2::text::bigint[]) AS event_nid, unnest($3::text::int[]) AS room_nid, unnest($4::text::boolean[]) AS backfilled, generate_subscripts($2::text::bigint[], 1) AS ordinal WHERE $2::text <> '{}') AS i
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
        FROM (SELECT unnest($7::text::int[]) AS room_nid, unnest($8::text::int[]) AS state_key_nid, unnest($9::text::smallint[]) AS membership WHERE $7::text <> '{}') AS i
        UNION ALL
        SELECT i.*, NULL FROM (SELECT unnest($11::text::int[]) AS room_nid, unnest($12::text::int[]) AS state_key_nid WHERE $11::text <> '{}') AS i
    ) AS i
    LEFT JOIN LATERAL (
        SELECT membership FROM current_state
        WHERE room_nid = i.room_nid AND state_key_nid = i.state_key_nid
        OFFSET 0
    ) AS c ON true
    GROUP BY i.room_nid
),
new_room AS (
    INSERT INTO rooms (room_nid, next_audience, current_state_group, max_topological_ordering, current_audience, room_id, room_version, forward_extremities, out_of_range, in_order_ts, write_version, last_stream_ordering, joined_count,
        invited_count)
    SELECT i.room_nid, i.next_audience, i.current_state_group, i.max_topological_ordering, i.current_audience, i.room_id, i.room_version, i.forward_extremities::bigint[], i.out_of_range::int8multirange, i.in_order_ts, 1,
        (SELECT max(p.stream_ordering) FROM positioned p
            WHERE p.room_nid = i.room_nid AND NOT p.backfilled),
        COALESCE((SELECT c.joined FROM counted c WHERE c.room_nid = i.room_nid), 0),
        COALESCE((SELECT c.invited FROM counted c WHERE c.room_nid = i.room_nid), 0)
    FROM (SELECT unnest($13::text::int[]) AS room_nid, unnest($14::text::bigint[]) AS next_audience, unnest($15::text::bigint[]) AS current_state_group, unnest($16::text::bigint[]) AS max_topological_ordering, unnest($17::text::bigint[]) AS current_audience, unnest($18::text::text[]) AS room_id, unnest($19::text::text[]) AS room_version, unnest($20::text::text[]) AS forward_extremities, unnest($21::text::text[]) AS out_of_range, unnest($22::text::bigint[]) AS in_order_ts WHERE $13::text <> '{}') AS i
    RETURNING room_nid
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
        moves = r.moves + (i.room_nid = ANY($25::text::int[]))::int
    FROM (SELECT unnest($26::text::bigint[]) AS write_version, unnest($27::text::int[]) AS room_nid, unnest($28::text::bigint[]) AS next_audience, unnest($29::text::bigint[]) AS current_state_group, unnest($30::text::bigint[]) AS max_topological_ordering, unnest($31::text::bigint[]) AS current_audience, unnest($32::text::bigint[]) AS removals, unnest($33::text::text[]) AS forward_extremities, unnest($34::text::text[]) AS out_of_range, unnest($35::text::bigint[]) AS in_order_ts WHERE $27::text <> '{}') AS i
    JOIN locked USING (room_nid)
    WHERE r.room_nid = i.room_nid AND r.write_version = i.write_version
    RETURNING r.room_nid, r.moves, r.removals <> i.removals AS has_lost
),
reordered_event AS (
    INSERT INTO reordered_events (event_nid, topological_before, room_nid, moves)
    SELECT i.event_nid, i.topological_before, i.room_nid, r.moves
    FROM (SELECT unnest($23::text::bigint[]) AS event_nid, unnest($24::text::bigint[]) AS topological_before, unnest($25::text::int[]) AS room_nid WHERE $23::text <> '{}') AS i
    JOIN old_room r USING (room_nid)
),
new_type AS (
    INSERT INTO event_types (type_nid, type)
    SELECT * FROM (SELECT unnest($36::text::int[]) AS type_nid, unnest($37::text::text[]) AS type WHERE $36::text <> '{}') AS i
),
new_state_key AS (
    INSERT INTO state_keys (state_key_nid, type_nid, state_key)
    SELECT * FROM (SELECT unnest($38::text::int[]) AS state_key_nid, unnest($39::text::int[]) AS type_nid, unnest($40::text::text[]) AS state_key WHERE $38::text <> '{}') AS i
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT * FROM (SELECT unnest($41::text::int[]) AS principal_nid, unnest($42::text::text[]) AS name WHERE $41::text <> '{}') AS i
),
new_event AS (
    INSERT INTO events (event_nid, topological_ordering, depth, origin_server_ts, state_group_before, state_group_after, audience, redacted_by, relates_to, room_nid, sender_nid, type_nid, state_key_nid, rel_type_nid, membership, outlier, backfilled, soft_failed, redacted_form, ineffective, replaces, has_url, after_gap, event_id, rejected, prev_events, auth_events, json, superseded, refused, prev_distance, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4, describes_room, in_order_ts, stream_ordering, received_ts, encoding, writer_nid)
    SELECT i.event_nid, i.topological_ordering, i.depth, i.origin_server_ts, i.state_group_before, i.state_group_after, i.audience, i.redacted_by, i.relates_to, i.room_nid, i.sender_nid, i.type_nid, i.state_key_nid, i.rel_type_nid, i.membership, i.outlier, i.backfilled, i.soft_failed, i.redacted_form, i.ineffective, i.replaces, i.has_url, i.after_gap, i.event_id, i.rejected, i.prev_events::bigint[], i.auth_events::bigint[], i.json, i.superseded, i.refused, i.prev_distance, i.auth_distance_1, i.auth_distance_2, i.auth_distance_3, i.auth_distance_4, i.describes_room, i.in_order_ts, p.stream_ordering, $43::bigint, 0, $44::smallint
    FROM (SELECT unnest($45::text::bigint[]) AS event_nid, unnest($46::text::bigint[]) AS topological_ordering, unnest($47::text::bigint[]) AS depth, unnest($48::text::bigint[]) AS origin_server_ts, unnest($49::text::bigint[]) AS state_group_before, unnest($50::text::bigint[]) AS state_group_after, unnest($51::text::bigint[]) AS audience, unnest($52::text::bigint[]) AS redacted_by, unnest($53::text::bigint[]) AS relates_to, unnest($54::text::int[]) AS room_nid, unnest($55::text::int[]) AS sender_nid, unnest($56::text::int[]) AS type_nid, unnest($57::text::int[]) AS state_key_nid, unnest($58::text::int[]) AS rel_type_nid, unnest($59::text::smallint[]) AS membership, unnest($60::text::boolean[]) AS outlier, unnest($61::text::boolean[]) AS backfilled, unnest($62::text::boolean[]) AS soft_failed, unnest($63::text::boolean[]) AS redacted_form, unnest($64::text::boolean[]) AS ineffective, unnest($65::text::boolean[]) AS replaces, unnest($66::text::boolean[]) AS has_url, unnest($67::text::boolean[]) AS after_gap, unnest($68::text::text[]) AS event_id, unnest($69::text::text[]) AS rejected, unnest($70::text::text[]) AS prev_events, unnest($71::text::text[]) AS auth_events, unnest($72::bytea[]) AS json, unnest($73::text::boolean[]) AS superseded, unnest($74::text::text[]) AS refused, unnest($75::text::int[]) AS prev_distance, unnest($76::text::int[]) AS auth_distance_1, unnest($77::text::int[]) AS auth_distance_2, unnest($78::text::int[]) AS auth_distance_3, unnest($79::text::int[]) AS auth_distance_4, unnest($80::text::boolean[]) AS describes_room, unnest($81::text::bigint[]) AS in_order_ts WHERE $45::text <> '{}') AS i
    LEFT JOIN positioned p USING (event_nid)
),
changed_event AS (
    UPDATE events e
    SET stream_ordering = COALESCE(p.stream_ordering, e.stream_ordering),
        writer_nid = CASE WHEN p.stream_ordering IS NULL THEN e.writer_nid ELSE $44::smallint END,
        after_gap = COALESCE(i.after_gap, e.after_gap),
        in_order_ts = CASE WHEN p.stream_ordering IS NULL THEN e.in_order_ts
            ELSE i.in_order_ts END,
        arrival_ordering = CASE WHEN i.readmitted THEN e.stream_ordering
            ELSE e.arrival_ordering END,
        auth_events = CASE WHEN i.authorised THEN i.auth_events::bigint[] ELSE e.auth_events END,
        auth_distance_1 = CASE WHEN i.authorised THEN i.auth_distance_1
            ELSE e.auth_distance_1 END,
        auth_distance_2 = CASE WHEN i.authorised THEN i.auth_distance_2
            ELSE e.auth_distance_2 END,
        auth_distance_3 = CASE WHEN i.authorised THEN i.auth_distance_3
            ELSE e.auth_distance_3 END,
        auth_distance_4 = CASE WHEN i.authorised THEN i.auth_distance_4
            ELSE e.auth_distance_4 END,
        topological_ordering = i.topological_ordering, depth = i.depth, state_group_before = i.state_group_before, state_group_after = i.state_group_after, audience = i.audience, redacted_by = i.redacted_by, outlier = i.outlier, backfilled = i.backfilled, soft_failed = i.soft_failed, ineffective = i.ineffective, superseded = i.superseded, rejected = i.rejected, refused = i.refused, prev_events = i.prev_events::bigint[], prev_distance = i.prev_distance
    FROM (SELECT unnest($82::text::bigint[]) AS event_nid, unnest($83::text::bigint[]) AS topological_ordering, unnest($84::text::bigint[]) AS depth, unnest($85::text::bigint[]) AS state_group_before, unnest($86::text::bigint[]) AS state_group_after, unnest($87::text::bigint[]) AS audience, unnest($88::text::bigint[]) AS redacted_by, unnest($89::text::boolean[]) AS outlier, unnest($90::text::boolean[]) AS backfilled, unnest($91::text::boolean[]) AS soft_failed, unnest($92::text::boolean[]) AS ineffective, unnest($93::text::boolean[]) AS superseded, unnest($94::text::text[]) AS rejected, unnest($95::text::text[]) AS refused, unnest($96::text::text[]) AS prev_events, unnest($97::text::int[]) AS prev_distance, unnest($98::text::boolean[]) AS after_gap, unnest($99::text::bigint[]) AS in_order_ts, unnest($100::text::text[]) AS auth_events, unnest($101::text::int[]) AS auth_distance_1, unnest($102::text::int[]) AS auth_distance_2, unnest($103::text::int[]) AS auth_distance_3, unnest($104::text::int[]) AS auth_distance_4, unnest($105::text::boolean[]) AS authorised, unnest($106::text::boolean[]) AS readmitted WHERE $82::text <> '{}') AS i
    LEFT JOIN positioned p USING (event_nid)
    WHERE e.event_nid = i.event_nid
),
new_gap AS (
    INSERT INTO missing_events (event_nid, room_nid, superseded, event_id, child_nids)
    SELECT i.event_nid, i.room_nid, i.superseded, i.event_id, i.child_nids::bigint[]
    FROM (SELECT unnest($107::text::bigint[]) AS event_nid, unnest($108::text::int[]) AS room_nid, unnest($109::text::boolean[]) AS superseded, unnest($110::text::text[]) AS event_id, unnest($111::text::text[]) AS child_nids WHERE $107::text <> '{}') AS i
    ON CONFLICT (event_nid)
        DO UPDATE SET superseded = EXCLUDED.superseded, child_nids = EXCLUDED.child_nids
),
filled_gap AS (
    DELETE FROM missing_events
    WHERE event_id = ANY($5::text::text[])
    RETURNING event_nid
),
new_group AS (
    INSERT INTO state_groups (state_group, digest, audience, room_nid, entry_count, runs, back, key_nids, event_nids, member_key_nids, member_event_nids, key_nid, member_key_nid, event_nid, path)
    SELECT i.state_group, i.digest, i.audience, i.room_nid, i.entry_count, i.runs, i.back::int[], i.key_nids::int[], i.event_nids::bigint[], i.member_key_nids::int[], i.member_event_nids::bigint[], i.key_nid, i.member_key_nid, i.event_nid, i.path
    FROM (SELECT unnest($112::text::bigint[]) AS state_group, unnest($113::text::bigint[]) AS digest, unnest($114::text::bigint[]) AS audience, unnest($115::text::int[]) AS room_nid, unnest($116::text::int[]) AS entry_count, unnest($117::text::int[]) AS runs, unnest($118::text::text[]) AS back, unnest($119::text::text[]) AS key_nids, unnest($120::text::text[]) AS event_nids, unnest($121::text::text[]) AS member_key_nids, unnest($122::text::text[]) AS member_event_nids, unnest($123::text::int[]) AS key_nid, unnest($124::text::int[]) AS member_key_nid, unnest($125::text::bigint[]) AS event_nid, unnest($126::bytea[]) AS path WHERE $112::text <> '{}') AS i
),
new_state AS (
    INSERT INTO current_state (event_nid, room_nid, state_key_nid, membership)
    SELECT i.event_nid, i.room_nid, i.state_key_nid, i.membership
    FROM (SELECT unnest($6::text::bigint[]) AS event_nid, unnest($7::text::int[]) AS room_nid, unnest($8::text::int[]) AS state_key_nid, unnest($9::text::smallint[]) AS membership, unnest($10::text::boolean[]) AS is_new WHERE $7::text <> '{}') AS i
    WHERE i.is_new
),
set_state AS (
    INSERT INTO current_state (event_nid, room_nid, state_key_nid, membership)
    SELECT i.event_nid, i.room_nid, i.state_key_nid, i.membership
    FROM (SELECT unnest($6::text::bigint[]) AS event_nid, unnest($7::text::int[]) AS room_nid, unnest($8::text::int[]) AS state_key_nid, unnest($9::text::smallint[]) AS membership, unnest($10::text::boolean[]) AS is_new WHERE $7::text <> '{}') AS i
    WHERE NOT i.is_new
    ON CONFLICT (room_nid, state_key_nid) DO UPDATE SET event_nid = EXCLUDED.event_nid, membership = EXCLUDED.membership
),
new_delta AS (
    INSERT INTO state_deltas (event_nid, prev_event_nid, room_nid, state_key_nid, stream_ordering, writer_nid)
    SELECT i.event_nid, i.prev_event_nid, i.room_nid, i.state_key_nid, p.stream_ordering, $44::smallint
    FROM (SELECT unnest($127::text::bigint[]) AS event_nid, unnest($128::text::bigint[]) AS prev_event_nid, unnest($129::text::int[]) AS room_nid, unnest($130::text::int[]) AS state_key_nid, unnest($131::text::bigint[]) AS cause_nid WHERE $129::text <> '{}') AS i
    JOIN positioned p ON p.event_nid = i.cause_nid
),
removed_state AS (
    DELETE FROM current_state c
    USING (SELECT unnest($11::text::int[]) AS room_nid, unnest($12::text::int[]) AS state_key_nid WHERE $11::text <> '{}') AS i
    WHERE c.room_nid = i.room_nid AND c.state_key_nid = i.state_key_nid
),
out_of_band AS (
    INSERT INTO outlier_memberships (stream_id, event_nid, writer_nid)
    SELECT nextval('events_stream'), i.event_nid, $44::smallint
    FROM (SELECT unnest($132::text::bigint[]) AS event_nid WHERE $132::text <> '{}') AS i
    RETURNING stream_id, event_nid
),
set_out_of_band AS (
    INSERT INTO out_of_band_memberships (room_nid, principal_nid, event_nid, stripped_state)
    SELECT i.room_nid, i.principal_nid, i.event_nid, i.stripped_state
    FROM (SELECT unnest($132::text::bigint[]) AS event_nid, unnest($133::text::int[]) AS principal_nid, unnest($134::text::int[]) AS room_nid, unnest($135::text::text[]) AS stripped_state WHERE $132::text <> '{}') AS i
    ON CONFLICT (room_nid, principal_nid)
        DO UPDATE SET event_nid = EXCLUDED.event_nid, stripped_state = EXCLUDED.stripped_state
),
set_membership AS (
    INSERT INTO memberships (event_nid, principal_nid, room_nid, membership, stream_ordering, writer_nid)
    SELECT i.event_nid, i.principal_nid, i.room_nid, i.membership, COALESCE(p.stream_ordering, o.stream_id), $44::smallint
    FROM (SELECT unnest($136::text::bigint[]) AS event_nid, unnest($137::text::int[]) AS principal_nid, unnest($138::text::int[]) AS room_nid, unnest($139::text::smallint[]) AS membership, unnest($140::text::bigint[]) AS cause_nid WHERE $137::text <> '{}') AS i
    LEFT JOIN positioned p ON p.event_nid = i.cause_nid
    LEFT JOIN out_of_band o ON o.event_nid = i.event_nid AND i.cause_nid IS NULL
    ON CONFLICT (principal_nid, room_nid) DO UPDATE
        SET event_nid = EXCLUDED.event_nid, membership = EXCLUDED.membership,
            stream_ordering = EXCLUDED.stream_ordering,
            writer_nid = EXCLUDED.writer_nid,
            -- until a join, an invite or a knock; code that does not know the column keeps it
            forgotten = memberships.forgotten AND memberships.membership < 3 /* KNOCK */
                AND EXCLUDED.membership < 3 /* KNOCK */ AND NOT EXISTS (
                    SELECT FROM (SELECT unnest($137::text::int[]) AS principal_nid, unnest($138::text::int[]) AS room_nid, unnest($141::text::boolean[]) AS entered WHERE $137::text <> '{}') AS a
                    WHERE a.entered AND a.principal_nid = EXCLUDED.principal_nid
                        AND a.room_nid = EXCLUDED.room_nid
                )
),
overruled AS (
    DELETE FROM out_of_band_memberships o
    USING (SELECT unnest($137::text::int[]) AS principal_nid, unnest($138::text::int[]) AS room_nid, unnest($140::text::bigint[]) AS cause_nid WHERE $137::text <> '{}') AS i
    WHERE o.room_nid = i.room_nid AND o.principal_nid = i.principal_nid AND i.cause_nid IS NOT NULL
),
new_visibility AS (
    INSERT INTO visibility (last_join_topological, room_nid, principal_nid, joined_count, invited_count, audiences, invited_audiences, first_audience)
    SELECT i.last_join_topological, i.room_nid, i.principal_nid, i.joined_count, i.invited_count, i.audiences::int8multirange, i.invited_audiences::int8multirange, i.first_audience
    FROM (SELECT unnest($142::text::bigint[]) AS last_join_topological, unnest($143::text::int[]) AS room_nid, unnest($144::text::int[]) AS principal_nid, unnest($145::text::int[]) AS joined_count, unnest($146::text::int[]) AS invited_count, unnest($147::text::text[]) AS audiences, unnest($148::text::text[]) AS invited_audiences, unnest($149::text::bigint[]) AS first_audience, unnest($150::text::boolean[]) AS is_new WHERE $143::text <> '{}') AS i
    WHERE i.is_new
),
set_visibility AS (  -- a purge may have deleted the row
    INSERT INTO visibility (last_join_topological, room_nid, principal_nid, joined_count, invited_count, audiences, invited_audiences, first_audience)
    SELECT i.last_join_topological, i.room_nid, i.principal_nid, i.joined_count, i.invited_count, i.audiences::int8multirange, i.invited_audiences::int8multirange, i.first_audience
    FROM (SELECT unnest($142::text::bigint[]) AS last_join_topological, unnest($143::text::int[]) AS room_nid, unnest($144::text::int[]) AS principal_nid, unnest($145::text::int[]) AS joined_count, unnest($146::text::int[]) AS invited_count, unnest($147::text::text[]) AS audiences, unnest($148::text::text[]) AS invited_audiences, unnest($149::text::bigint[]) AS first_audience, unnest($150::text::boolean[]) AS is_new WHERE $143::text <> '{}') AS i
    WHERE NOT i.is_new
    ON CONFLICT (room_nid, principal_nid) DO UPDATE SET last_join_topological = EXCLUDED.last_join_topological, joined_count = EXCLUDED.joined_count, invited_count = EXCLUDED.invited_count, audiences = EXCLUDED.audiences::int8multirange, invited_audiences = EXCLUDED.invited_audiences::int8multirange, first_audience = EXCLUDED.first_audience
),
new_audience AS (
    INSERT INTO audiences (audience, opened_topological, room_nid, branches, continued)
    SELECT i.audience, i.opened_topological, i.room_nid, i.branches, i.continued
    FROM (SELECT unnest($151::text::bigint[]) AS audience, unnest($152::text::bigint[]) AS opened_topological, unnest($153::text::int[]) AS room_nid, unnest($154::text::int[]) AS branches, unnest($155::text::boolean[]) AS continued, unnest($156::text::boolean[]) AS is_new WHERE $151::text <> '{}') AS i
    WHERE i.is_new
),
set_audience AS (
    INSERT INTO audiences (audience, opened_topological, room_nid, branches, continued)
    SELECT i.audience, i.opened_topological, i.room_nid, i.branches, i.continued
    FROM (SELECT unnest($151::text::bigint[]) AS audience, unnest($152::text::bigint[]) AS opened_topological, unnest($153::text::int[]) AS room_nid, unnest($154::text::int[]) AS branches, unnest($155::text::boolean[]) AS continued, unnest($156::text::boolean[]) AS is_new WHERE $151::text <> '{}') AS i
    WHERE NOT i.is_new
    ON CONFLICT (room_nid, audience)
        DO UPDATE SET branches = EXCLUDED.branches, continued = EXCLUDED.continued
),
set_past AS (
    INSERT INTO past_visibility (first_audience, opened_topological, room_nid, principal_nid, audiences, invited_audiences, topological_ranges)
    SELECT i.first_audience, i.opened_topological, i.room_nid, i.principal_nid, i.audiences::int8multirange, i.invited_audiences::int8multirange, i.topological_ranges::int8multirange
    FROM (SELECT unnest($157::text::bigint[]) AS first_audience, unnest($158::text::bigint[]) AS opened_topological, unnest($159::text::int[]) AS room_nid, unnest($160::text::int[]) AS principal_nid, unnest($161::text::text[]) AS audiences, unnest($162::text::text[]) AS invited_audiences, unnest($163::text::text[]) AS topological_ranges WHERE $157::text <> '{}') AS i
    ON CONFLICT (room_nid, principal_nid, first_audience) DO UPDATE
        SET audiences = EXCLUDED.audiences,
            invited_audiences = EXCLUDED.invited_audiences,
            topological_ranges = EXCLUDED.topological_ranges
),
new_waiting AS (
    INSERT INTO waiting_redactions (redaction_nid, room_nid, target_event_id)
    SELECT * FROM (SELECT unnest($164::text::bigint[]) AS redaction_nid, unnest($165::text::int[]) AS room_nid, unnest($166::text::text[]) AS target_event_id WHERE $164::text <> '{}') AS i
),
settled AS (
    DELETE FROM waiting_redactions w
    WHERE w.target_event_id = ANY($167::text::text[]) AND EXISTS (
        SELECT FROM (SELECT unnest($167::text::text[]) AS event_id, unnest($168::text::int[]) AS room_nid WHERE $167::text <> '{}') AS t
        WHERE t.event_id = w.target_event_id AND t.room_nid = w.room_nid
    )
    RETURNING w.redaction_nid
),
new_chain_position AS (
    INSERT INTO auth_chains (event_nid, chain_nid, sequence_number, event_id, state_key, link_1, link_2)
    SELECT * FROM (SELECT unnest($169::text::bigint[]) AS event_nid, unnest($170::text::bigint[]) AS chain_nid, unnest($171::text::int[]) AS sequence_number, unnest($172::text::text[]) AS event_id, unnest($173::text::text[]) AS state_key, unnest($174::text::bigint[]) AS link_1, unnest($175::text::bigint[]) AS link_2 WHERE $169::text <> '{}') AS i
),
new_link AS (
    INSERT INTO auth_chain_links (chain_nid, target_chain_nid, sequence_number, target_sequence_number)
    SELECT * FROM (SELECT unnest($176::text::bigint[]) AS chain_nid, unnest($177::text::bigint[]) AS target_chain_nid, unnest($178::text::int[]) AS sequence_number, unnest($179::text::int[]) AS target_sequence_number WHERE $176::text <> '{}') AS i
),
dropped_extremity AS (
    INSERT INTO dropped_extremities (event_nid, room_nid)
    SELECT * FROM (SELECT unnest($180::text::bigint[]) AS event_nid, unnest($181::text::int[]) AS room_nid WHERE $180::text <> '{}') AS i
),
new_transaction AS (  -- refused by the primary key if another process has stored the request
    INSERT INTO local_transactions (event_nid, room_nid, sender_nid, device_id, transaction_id, event_id, sent_ts)
    SELECT i.event_nid, i.room_nid, i.sender_nid, i.device_id, i.transaction_id, i.event_id, $43::bigint
    FROM (SELECT unnest($182::text::bigint[]) AS event_nid, unnest($183::text::int[]) AS room_nid, unnest($184::text::int[]) AS sender_nid, unnest($185::text::text[]) AS device_id, unnest($186::text::text[]) AS transaction_id, unnest($187::text::text[]) AS event_id WHERE $183::text <> '{}') AS i
),
new_invalidation AS (
    INSERT INTO cache_invalidations (stream_id, invalidation_ts, writer_nid, cache_name, keys)
    SELECT nextval('caches_stream'), $43::bigint, $44::smallint, i.cache_name,
        ARRAY(SELECT jsonb_array_elements_text(i.keys_json::jsonb))
    FROM (SELECT unnest($188::text::text[]) AS cache_name, unnest($189::text::text[]) AS keys_json WHERE $188::text <> '{}') AS i
    RETURNING stream_id
),
latest AS (  -- the positions this write takes, per stream
    SELECT CASE WHEN backfilled THEN 'backfill' ELSE 'events' END AS stream_name,
        max(stream_ordering) AS stream_id
    FROM positioned
    GROUP BY 1
    UNION ALL
    SELECT 'events', max(stream_id) FROM out_of_band HAVING count(*) > 0
    UNION ALL
    SELECT 'caches', max(stream_id) FROM new_invalidation HAVING count(*) > 0
),
set_position AS (
    INSERT INTO stream_positions (stream_name, instance_name, stream_id)
    SELECT stream_name, $190::text, max(stream_id) FROM latest GROUP BY 1
    ON CONFLICT (stream_name, instance_name)
        DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
    WHERE stream_positions.epoch = $191::int
    RETURNING stream_name
)
SELECT p.event_nid, p.stream_ordering, NULL::bigint AS invalidation_id, NULL::int AS writers,
    NULL::bigint AS stale
FROM positioned p
UNION ALL
SELECT o.event_nid, o.stream_id, NULL, NULL, NULL
FROM out_of_band o
UNION ALL
SELECT NULL, NULL, n.stream_id, NULL, NULL
FROM new_invalidation n
UNION ALL
SELECT NULL, NULL, NULL,
    (SELECT count(*)::int FROM stream_positions WHERE stream_name = 'events'),
    CASE
        WHEN (SELECT count(*) FROM old_room) <> cardinality($27::text::int[])
            THEN refuse_stale_plan('rooms')
        WHEN EXISTS (  -- stored before this statement, as its snapshot shows
            SELECT FROM (SELECT unnest($68::text::text[]) AS id) AS one
            CROSS JOIN LATERAL (SELECT FROM events WHERE event_id = one.id OFFSET 0) AS e
        ) THEN refuse_stale_plan('events')
        WHEN EXISTS (SELECT FROM old_room WHERE has_lost) AND dependencies_purged(
            $192::text::bigint[], $193::text::bigint[], $194::text::bigint[],
            $5::text::text[] || $68::text::text[],
            $2::text::bigint[] || $45::text::bigint[],
            $195::text::bigint[]
        ) THEN refuse_stale_plan('removals')
        WHEN EXISTS (SELECT event_nid FROM filled_gap EXCEPT SELECT unnest($196::text::bigint[])) THEN refuse_stale_plan('missing_events')
        WHEN EXISTS (SELECT redaction_nid FROM settled EXCEPT SELECT unnest($195::text::bigint[])) THEN refuse_stale_plan('waiting_redactions')
        WHEN EXISTS (
            SELECT FROM latest WHERE stream_name NOT IN (SELECT stream_name FROM set_position)
        ) THEN refuse_old_writer($190::text)
    END
