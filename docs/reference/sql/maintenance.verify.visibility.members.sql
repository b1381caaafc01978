-- Sent by storage.maintenance.verify.visibility.read_facts. Parameters: $1 int.

SELECT e.event_nid, e.membership, e.state_key_nid, k.state_key AS user_id
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE e.type_nid = 2 /* TYPE_MEMBER */
