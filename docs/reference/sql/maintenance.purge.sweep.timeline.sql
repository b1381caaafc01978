-- Sent by storage.maintenance.purge.sweep._roots. Parameters: $1 int, $2 bigint, $3 bigint, $4
-- bigint.

SELECT event_nid, topological_ordering, stream_ordering,
    array_remove(array_append(auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4), redacted_by), NULL) AS named
FROM events
WHERE room_nid = $1::int AND NOT outlier
    AND (topological_ordering, stream_ordering) > ($2::bigint, $3::bigint)
ORDER BY topological_ordering, stream_ordering
LIMIT $4::bigint
