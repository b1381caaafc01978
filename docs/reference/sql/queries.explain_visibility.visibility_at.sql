-- Sent by storage.queries.explain_visibility._visibility. Parameters: $1 bigint.

SELECT e.json, e.redacted_form, e.event_id, r.room_id, r.room_version
FROM state_entries($1::bigint) AS s
JOIN events e ON e.event_nid = s.event_nid
JOIN rooms r USING (room_nid)
WHERE s.state_key_nid = 5 /* KEY_HISTORY_VISIBILITY */
