-- Sent by storage.persist.load.lookups._local_members. Parameters: $1 int.

SELECT p.name
FROM visibility v
CROSS JOIN LATERAL (SELECT membership FROM memberships
    WHERE principal_nid = v.principal_nid AND room_nid = v.room_nid OFFSET 0) AS m
CROSS JOIN LATERAL (SELECT name FROM principals
    WHERE principal_nid = v.principal_nid OFFSET 0) AS p
WHERE v.room_nid = $1::int AND m.membership = 5 /* JOIN */
ORDER BY v.principal_nid
LIMIT 100
