-- Sent by storage.maintenance.verify.auth_results.wrongly_rejected. Parameters: $1 int.

SELECT e.event_nid, e.state_group_before
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
WHERE e.rejected IS NOT NULL
ORDER BY e.event_nid
