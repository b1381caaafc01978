-- Sent by storage.maintenance.verify.event_loader.EventLoader. Parameters: $1 bigint[].

SELECT e.event_nid, e.event_id, e.stream_ordering, e.outlier, e.rejected,
    auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4) AS auth_events, e.json,
    e.room_nid, r.room_id, r.room_version
FROM events e
CROSS JOIN LATERAL (
    SELECT room_id, room_version FROM rooms WHERE room_nid = e.room_nid OFFSET 0
) AS r
WHERE e.event_nid = ANY($1::bigint[])
