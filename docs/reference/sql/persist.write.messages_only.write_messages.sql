-- Sent by storage.persist.write.messages_only.statement_for. Parameters: $1 to $6 room (room_nid,
-- write_version, max_topological_ordering, forward_extremities, removals, in_order_ts), $7
-- received_ts bigint, $8 writer_nid smallint, $9 to $32 new_message (event_nid,
-- topological_ordering, depth, origin_server_ts, state_group_before, audience, relates_to,
-- room_nid, sender_nid, type_nid, rel_type_nid, redacted_form, replaces, has_url, event_id,
-- prev_events, auth_events, json, prev_distance, auth_distance_1, auth_distance_2, auth_distance_3,
-- auth_distance_4, in_order_ts), $33 to $38 new_transaction (event_nid, room_nid, sender_nid,
-- device_id, transaction_id, event_id), $39 instance_name text, $40 epoch int, $41 to $43
-- dependencies (timeline_nids, stored_nids, state_groups).

WITH
locked AS MATERIALIZED (  -- in a fixed order, so that two writers never wait for each other
    SELECT room_nid, pg_advisory_xact_lock(1919905645 /* LOCK_ROOM */, room_nid)
    FROM (SELECT unnest($1::text::int[]) AS room_nid ORDER BY 1) AS ordered
),
new_event AS (  -- positions after the locks, as late as can be
    INSERT INTO events (event_nid, topological_ordering, depth, origin_server_ts, state_group_before, audience, relates_to, room_nid, sender_nid, type_nid, rel_type_nid, redacted_form, replaces, has_url, event_id, prev_events, auth_events, json, prev_distance, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4, in_order_ts, stream_ordering, received_ts, encoding, writer_nid,
        outlier, backfilled, soft_failed)
    SELECT i.event_nid, i.topological_ordering, i.depth, i.origin_server_ts, i.state_group_before, i.audience, i.relates_to, i.room_nid, i.sender_nid, i.type_nid, i.rel_type_nid, i.redacted_form, i.replaces, i.has_url, i.event_id, i.prev_events::bigint[], i.auth_events::bigint[], i.json, i.prev_distance, i.auth_distance_1, i.auth_distance_2, i.auth_distance_3, i.auth_distance_4, i.in_order_ts, nextval('events_stream'), $7::bigint, 0, $8::smallint,
        false, false, false
    FROM (
        SELECT *
        FROM (SELECT unnest($9::text::bigint[]) AS event_nid, unnest($10::text::bigint[]) AS topological_ordering, unnest($11::text::bigint[]) AS depth, unnest($12::text::bigint[]) AS origin_server_ts, unnest($13::text::bigint[]) AS state_group_before, unnest($14::text::bigint[]) AS audience, unnest($15::text::bigint[]) AS relates_to, unnest($16::text::int[]) AS room_nid, unnest($17::text::int[]) AS sender_nid, unnest($18::text::int[]) AS type_nid, unnest($19::text::int[]) AS rel_type_nid, unnest($20::text::boolean[]) AS redacted_form, unnest($21::text::boolean[]) AS replaces, unnest($22::text::boolean[]) AS has_url, unnest($23::text::text[]) AS event_id, unnest($24::text::text[]) AS prev_events, unnest($25::text::text[]) AS auth_events, unnest($26::bytea[]) AS json, unnest($27::text::int[]) AS prev_distance, unnest($28::text::int[]) AS auth_distance_1, unnest($29::text::int[]) AS auth_distance_2, unnest($30::text::int[]) AS auth_distance_3, unnest($31::text::int[]) AS auth_distance_4, unnest($32::text::bigint[]) AS in_order_ts, generate_subscripts($9::text::bigint[], 1) AS ordinal WHERE $9::text <> '{}') AS u
        WHERE (SELECT count(*) FROM locked) >= 0
        ORDER BY ordinal
    ) AS i
    RETURNING event_nid, stream_ordering, room_nid, event_id
),
room AS (  -- the compare-and-set
    UPDATE rooms r
    SET write_version = r.write_version + 1,
        last_stream_ordering = (SELECT max(e.stream_ordering) FROM new_event e
            WHERE e.room_nid = i.room_nid),
        max_topological_ordering = i.max_topological_ordering,
        forward_extremities = i.forward_extremities::bigint[],
        in_order_ts = i.in_order_ts
    FROM (SELECT unnest($1::text::int[]) AS room_nid, unnest($2::text::bigint[]) AS write_version, unnest($3::text::bigint[]) AS max_topological_ordering, unnest($4::text::text[]) AS forward_extremities, unnest($5::text::bigint[]) AS removals, unnest($6::text::bigint[]) AS in_order_ts WHERE $1::text <> '{}') AS i
    JOIN locked USING (room_nid)
    WHERE r.room_nid = i.room_nid AND r.write_version = i.write_version
    RETURNING r.room_nid, r.removals <> i.removals AS has_lost
),
new_transaction AS (  -- refused by the primary key if another process has stored the request
    INSERT INTO local_transactions (event_nid, room_nid, sender_nid, device_id, transaction_id, event_id, sent_ts)
    SELECT i.event_nid, i.room_nid, i.sender_nid, i.device_id, i.transaction_id, i.event_id, $7::bigint
    FROM (SELECT unnest($33::text::bigint[]) AS event_nid, unnest($34::text::int[]) AS room_nid, unnest($35::text::int[]) AS sender_nid, unnest($36::text::text[]) AS device_id, unnest($37::text::text[]) AS transaction_id, unnest($38::text::text[]) AS event_id WHERE $34::text <> '{}') AS i
),
set_position AS (
    INSERT INTO stream_positions (stream_name, instance_name, stream_id)
    SELECT 'events', $39::text, max(stream_ordering) FROM new_event
    ON CONFLICT (stream_name, instance_name)
        DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
    WHERE stream_positions.epoch = $40::int
    RETURNING stream_id
)
SELECT e.event_nid, e.stream_ordering,
    (SELECT count(*)::int FROM stream_positions WHERE stream_name = 'events') AS writers,
    CASE
        WHEN (SELECT count(*) FROM room) <> cardinality($1::text::int[])
            THEN refuse_stale_plan('rooms')
        WHEN EXISTS (  -- stored before this statement, as its snapshot shows
            SELECT FROM (SELECT unnest($23::text::text[]) AS id) AS one
            CROSS JOIN LATERAL (SELECT FROM events WHERE event_id = one.id OFFSET 0) AS e
        ) THEN refuse_stale_plan('events')
        WHEN EXISTS (SELECT FROM room WHERE has_lost) AND dependencies_purged(
            $41::text::bigint[], $42::text::bigint[], $43::text::bigint[], $23::text::text[], $9::text::bigint[], '{}'
        ) THEN refuse_stale_plan('removals')
        WHEN EXISTS (SELECT FROM missing_events WHERE event_id = ANY($23::text::text[]))
            THEN refuse_stale_plan('missing_events')
        WHEN EXISTS (
            SELECT FROM waiting_redactions w
            WHERE w.target_event_id = ANY($23::text::text[])
                AND EXISTS (SELECT FROM new_event e
                    WHERE e.event_id = w.target_event_id AND e.room_nid = w.room_nid)
        ) THEN refuse_stale_plan('waiting_redactions')
        WHEN NOT EXISTS (SELECT FROM set_position) THEN refuse_old_writer($39::text)
    END AS stale
FROM new_event e
