-- Sent by storage.maintenance.verify.auth_results.check_auth_results. Parameters: $1 int.

SELECT e.event_nid
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier AND NOT is_out_of_band(events)
    OFFSET 0
) AS e
WHERE e.outlier
ORDER BY e.event_nid
