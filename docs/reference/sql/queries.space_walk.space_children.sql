-- Sent by storage.queries.space_walk.children_of. Parameters: $1 text[].

SELECT r.room_id, k.state_key, e.origin_server_ts, r.room_version,
    e.event_id, e.stream_ordering, e.topological_ordering,
    CASE WHEN e.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = e.redacted_by) END AS redacted_by,
    e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.json
FROM rooms r
CROSS JOIN LATERAL state_but_members(r.current_state_group) AS entry
LEFT JOIN state_keys k USING (state_key_nid)
LEFT JOIN event_types t USING (type_nid)
LEFT JOIN events e USING (event_nid)
WHERE r.room_id = ANY($1::text[]) AND (t.type = 'm.space.child' OR entry.event_nid IS NULL)
