-- Sent by storage.queries.unread._threads_of. Parameters: $1 text[].

SELECT r.room_id, e.event_id, e.rel_type_nid = 22 /* REL_THREAD */ AS in_thread, e.json
FROM unnest($1::text[]) AS one (id)
CROSS JOIN LATERAL (SELECT * FROM events e WHERE e.event_id = one.id OFFSET 0) AS e
JOIN rooms r USING (room_nid)
WHERE e.rel_type_nid IS NOT NULL AND e.redacted_by IS NULL AND e.rejected IS NULL
