-- Sent by storage.rebuild.arrivals.misnamed. Parameters: $1 int, $2 boolean.

SELECT event_nid
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
WHERE rejected IS NOT NULL OR $2::boolean
ORDER BY event_nid
