-- Sent by storage.queries.inspect.resolution.resolution_at. Parameters: $1 text.

SELECT r.room_id, r.room_version, e.stream_ordering AS before,
    COALESCE(p.event_id, m.event_id) AS event_id,
    COALESCE(p.state_group_after, p.state_group_before) AS state_group,
    p.event_nid IS NOT NULL AS is_stored
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN LATERAL unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) WITH ORDINALITY AS parent (event_nid, place) ON true
LEFT JOIN events p ON p.event_nid = parent.event_nid
LEFT JOIN missing_events m ON m.event_nid = parent.event_nid
WHERE e.event_id = $1::text
ORDER BY parent.place
