-- Sent by storage.maintenance.purge.references.References. Parameters: $1 int.

SELECT o.auth_nid
FROM (
    SELECT unnest(auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4)) AS auth_nid
    FROM events e
    WHERE e.room_nid = $1::int AND e.outlier AND e.rejected IS NOT NULL
) AS o
GROUP BY o.auth_nid
