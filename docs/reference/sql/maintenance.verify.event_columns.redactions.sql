-- Sent by storage.maintenance.verify.event_columns.redactions. Parameters: $1 int.

SELECT event_nid, event_id, state_group_before, origin_server_ts, ineffective
FROM (SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier OFFSET 0) AS e
WHERE type_nid = 7 /* TYPE_REDACTION */ AND rejected IS NULL AND NOT soft_failed
ORDER BY event_nid
