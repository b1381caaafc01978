-- Sent by storage.queries.sliding.room_state._with_names. Parameters: $1 int[].

SELECT c.room_nid, r.room_version, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form AS is_redacted, e.json
FROM current_state c
JOIN rooms r USING (room_nid)
JOIN events e USING (event_nid)
WHERE c.room_nid = ANY($1::int[]) AND c.state_key_nid = 9 /* KEY_NAME */
