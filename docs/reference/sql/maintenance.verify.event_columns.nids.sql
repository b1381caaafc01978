-- Sent by storage.maintenance.verify.event_columns.check_contents and
-- storage.maintenance.verify.graph.doubled_events. Parameters: $1 int.

SELECT e.event_nid
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
ORDER BY e.event_nid
