-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

INSERT INTO waiting_redactions (room_nid, redaction_nid, target_event_id)
SELECT $1::int, redaction_nid, target_event_id
FROM pg_temp.waiting_redactions
WHERE room_nid = $2::int
