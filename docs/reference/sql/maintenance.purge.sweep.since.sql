-- Sent by storage.maintenance.purge.sweep._since. Parameters: $1 int, $2 bigint, $3 text.

SELECT event_nid AS nid,
    array_remove(array_append(auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4), redacted_by), NULL) AS event_nids
FROM events
WHERE room_nid = $1::int AND NOT outlier AND stream_ordering > $2::bigint
UNION ALL
SELECT event_nid AS nid, array_remove(array_append(auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4), redacted_by), NULL)
FROM events
WHERE room_nid = $1::int AND outlier AND age(xmin) <= age($3::text::xid)
