-- Sent by storage.maintenance.verify.event_loader.timeline. Parameters: $1 int, $2 bigint, $3
-- bigint, $4 bigint.

SELECT event_nid, event_id, stream_ordering, topological_ordering, state_group_before,
    state_group_after,
    state_key_nid, soft_failed, rejected, prev_nids(event_nid, prev_events, prev_distance) AS prev_events
FROM events
WHERE room_nid = $1::int
    AND NOT outlier
    AND (topological_ordering, stream_ordering) > ($2::bigint, $3::bigint)
ORDER BY topological_ordering, stream_ordering
LIMIT $4::bigint
