-- Sent by storage.maintenance.verify.auth_graph.check_cover. Parameters: $1 int.

SELECT e.event_id
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
CROSS JOIN LATERAL (SELECT * FROM auth_chains WHERE event_nid = e.event_nid OFFSET 0) AS a
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE a.event_id <> e.event_id OR a.state_key <> k.state_key
