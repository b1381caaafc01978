-- Sent by storage.maintenance.verify.current.replayed_groups. Parameters: $1 int, $2 bigint, $3
-- bigint.

SELECT event_nid, stream_ordering, COALESCE(state_group_after, state_group_before) AS state_group,
    rejected IS NULL AND NOT soft_failed AND NOT backfilled AS may_end, backfilled, event_id,
    prev_nids(event_nid, prev_events, prev_distance) AS prev_events
FROM events
WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled AND stream_ordering > $2::bigint
ORDER BY stream_ordering
LIMIT $3::bigint
