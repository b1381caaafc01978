-- Sent by storage.maintenance.purge.sweep._roots. Parameters: $1 int, $2 bigint, $3 bigint.

SELECT event_nid AS nid,
    array_remove(array_append(auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4), redacted_by), NULL) AS event_nids
FROM events
WHERE room_nid = $1::int AND outlier AND event_nid > $2::bigint
ORDER BY event_nid
LIMIT $3::bigint
