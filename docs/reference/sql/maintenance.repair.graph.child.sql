-- Sent by storage.maintenance.repair.graph._missing_id. Parameters: $1 bigint.

SELECT event_id, redacted_form, prev_nids(event_nid, prev_events, prev_distance) AS prev_events, json
FROM events
WHERE event_nid = $1::bigint
