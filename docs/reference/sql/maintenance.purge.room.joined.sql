-- Sent by storage.maintenance.purge.room.refuse_joined. Parameters: $1 int.

SELECT p.name
FROM current_state c
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = c.state_key_nid OFFSET 0
) AS k
CROSS JOIN LATERAL (
    SELECT principal_nid, name FROM principals WHERE name = k.state_key OFFSET 0
) AS p
CROSS JOIN LATERAL (
    SELECT membership FROM memberships
    WHERE principal_nid = p.principal_nid AND room_nid = c.room_nid
    OFFSET 0
) AS m
WHERE c.room_nid = $1::int AND c.membership = 5 /* JOIN */ AND m.membership = 5 /* JOIN */
ORDER BY p.name
LIMIT 1
