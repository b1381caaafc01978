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
    FROM (SELECT unnest(ARRAY[$1::int]) AS room_nid ORDER BY 1) AS ordered
),
new_event AS (  -- positions after the locks, as late as can be
    INSERT INTO events (event_nid, topological_ordering, depth, origin_server_ts, state_group_before, audience, relates_to, room_nid, sender_nid, type_nid, rel_type_nid, redacted_form, replaces, has_url, event_id, prev_events, auth_events, json, prev_distance, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4, in_order_ts, stream_ordering, received_ts, encoding, writer_nid,
        outlier, backfilled, soft_failed)
    SELECT i.event_nid, i.topological_ordering, i.depth, i.origin_server_ts, i.state_group_before, i.audience, i.relates_to, i.room_nid, i.sender_nid, i.type_nid, i.rel_type_nid, i.redacted_form, i.replaces, i.has_url, i.event_id, i.prev_events::bigint[], i.auth_events::bigint[], i.json, i.prev_distance, i.auth_distance_1, i.auth_distance_2, i.auth_distance_3, i.auth_distance_4, i.in_order_ts, nextval('events_stream'), $7::bigint, 0, $8::smallint,
        false, false, false
    FROM (
        SELECT *
        FROM (SELECT $9::bigint AS event_nid, $10::bigint AS topological_ordering, $11::bigint AS depth, $12::bigint AS origin_server_ts, $13::bigint AS state_group_before, $14::bigint AS audience, $15::bigint AS relates_to, $16::int AS room_nid, $17::int AS sender_nid, $18::int AS type_nid, $19::int AS rel_type_nid, $20::boolean AS redacted_form, $21::boolean AS replaces, $22::boolean AS has_url, $23::text AS event_id, $24::bigint[] AS prev_events, $25::bigint[] AS auth_events, $26::bytea AS json, $27::int AS prev_distance, $28::int AS auth_distance_1, $29::int AS auth_distance_2, $30::int AS auth_distance_3, $31::int AS auth_distance_4, $32::bigint AS in_order_ts, 1 AS ordinal) AS u
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
    FROM (SELECT $1::int AS room_nid, $2::bigint AS write_version, $3::bigint AS max_topological_ordering, $4::bigint[] AS forward_extremities, $5::bigint AS removals, $6::bigint AS in_order_ts) AS i
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
        WHEN (SELECT count(*) FROM room) <> cardinality(ARRAY[$1::int])
            THEN refuse_stale_plan('rooms')
        WHEN EXISTS (  -- stored before this statement, as its snapshot shows
            SELECT FROM (SELECT unnest(ARRAY[$23::text]) AS id) AS one
            CROSS JOIN LATERAL (SELECT FROM events WHERE event_id = one.id OFFSET 0) AS e
        ) THEN refuse_stale_plan('events')
        WHEN EXISTS (SELECT FROM room WHERE has_lost) AND dependencies_purged(
            $41::text::bigint[], $42::text::bigint[], $43::text::bigint[], ARRAY[$23::text], ARRAY[$9::bigint], '{}'
        ) THEN refuse_stale_plan('removals')
        WHEN EXISTS (SELECT FROM missing_events WHERE event_id = ANY(ARRAY[$23::text]))
            THEN refuse_stale_plan('missing_events')
        WHEN EXISTS (
            SELECT FROM waiting_redactions w
            WHERE w.target_event_id = ANY(ARRAY[$23::text])
                AND EXISTS (SELECT FROM new_event e
                    WHERE e.event_id = w.target_event_id AND e.room_nid = w.room_nid)
        ) THEN refuse_stale_plan('waiting_redactions')
        WHEN NOT EXISTS (SELECT FROM set_position) THEN refuse_old_writer($39::text)
    END AS stale
FROM new_event e
