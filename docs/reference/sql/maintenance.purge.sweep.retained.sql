-- Sent by storage.maintenance.purge.sweep._read_retained. Parameters: $1 int, $2 bigint, $3 bigint.

SELECT l.event_nid, e.event_id, l.local, e.outlier,
    array_remove(array_append(auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4), e.redacted_by), NULL) AS named
FROM (
    SELECT *
    FROM purge_retained_events
    WHERE room_nid = $1::int AND event_nid > $2::bigint
    ORDER BY event_nid
    LIMIT $3::bigint
) AS l
CROSS JOIN LATERAL (SELECT x.* FROM events x WHERE x.event_nid = l.event_nid OFFSET 0) AS e
ORDER BY l.event_nid
