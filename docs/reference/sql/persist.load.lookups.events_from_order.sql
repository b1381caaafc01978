-- Sent by storage.persist.load.lookups._order. Parameters: $1 int, $2 bigint, $3 bigint.

SELECT event_nid, event_id, room_nid, stream_ordering, topological_ordering, claimed_depth(depth, topological_ordering) AS depth, origin_server_ts, state_group_before, state_group_after, audience, redacted_by, sender_nid, type_nid, state_key_nid, membership, outlier, backfilled, soft_failed, redacted_form, rejected, prev_nids(event_nid, prev_events, prev_distance) AS prev_events, auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) AS auth_events, ineffective, refused, superseded
FROM events
WHERE room_nid = $1::int
    AND topological_ordering >= $2::bigint
    AND NOT outlier
ORDER BY topological_ordering, stream_ordering
LIMIT $3::bigint
