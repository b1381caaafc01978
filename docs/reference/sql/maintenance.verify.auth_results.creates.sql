-- Sent by storage.maintenance.verify.auth_results.check_auth_results. Parameters: $1 int.

SELECT e.event_id
FROM (SELECT * FROM events WHERE room_nid = $1::int AND type_nid = 1 /* TYPE_CREATE */ OFFSET 0) AS e
WHERE e.rejected IS NULL
ORDER BY e.event_id
