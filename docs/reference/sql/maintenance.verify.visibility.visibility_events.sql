-- Sent by storage.maintenance.verify.visibility.read_facts. Parameters: $1 int.

SELECT e.event_nid
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
WHERE e.state_key_nid = 5 /* KEY_HISTORY_VISIBILITY */
