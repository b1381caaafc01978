-- Sent by storage.maintenance.verify.auth_results.wrongly_superseded. Parameters: $1 int.

SELECT EXISTS (SELECT FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e WHERE e.refused IS NOT NULL)
