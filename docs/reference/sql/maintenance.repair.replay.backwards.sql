-- Sent by storage.maintenance.repair.replay.main_line. Parameters: $1 int, $2 bigint, $3 bigint, $4
-- bigint.

SELECT event_nid, stream_ordering, topological_ordering, prev_nids(event_nid, prev_events, prev_distance) AS prev_events
FROM events
WHERE room_nid = $1::int
    AND NOT outlier
    AND (topological_ordering, stream_ordering) < ($2::bigint, $3::bigint)
ORDER BY topological_ordering DESC, stream_ordering DESC
LIMIT $4::bigint
