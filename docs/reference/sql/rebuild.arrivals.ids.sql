-- Sent by storage.rebuild.arrivals.misnamed. Parameters: $1 int, $2 bigint, $3 boolean.

SELECT event_nid, event_id, json
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
WHERE event_nid > $2::bigint AND (rejected IS NOT NULL OR $3::boolean)
ORDER BY event_nid
LIMIT 1000
