-- Sent by storage.maintenance.verify.auth_graph.read_auth_graph. Parameters: $1 int.

SELECT event_nid, event_id, state_key_nid,
    -- an out-of-band event counts as rejected
    rejected IS NOT NULL OR (outlier AND COALESCE(membership <> 5 /* JOIN */, false)
        AND auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) = '{}') AS rejected,
    auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) AS auth_events
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
WHERE state_key_nid IS NOT NULL
ORDER BY event_nid
