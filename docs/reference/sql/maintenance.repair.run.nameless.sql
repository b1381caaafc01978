-- Sent by storage.maintenance.repair.run._check_names. Parameters: $1 int.

SELECT DISTINCT e.state_key_nid
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
LEFT JOIN LATERAL (
    SELECT true AS is_named FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k ON true
WHERE e.state_key_nid IS NOT NULL AND k.is_named IS NULL
