-- Sent by storage.maintenance.verify.event_columns.check_redactions. Parameters: $1 int.

SELECT e.event_id
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
WHERE e.ineffective AND (e.type_nid <> 7 /* TYPE_REDACTION */ OR e.outlier
    OR e.rejected IS NOT NULL OR e.soft_failed)
