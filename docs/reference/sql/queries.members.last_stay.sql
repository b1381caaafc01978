-- Sent by storage.queries.members._last_stay. Parameters: $1 text, $2 text.

SELECT COALESCE(c.membership = 5 /* JOIN */, false) AS is_joined,
    COALESCE(m.forgotten AND m.membership < 3 /* KNOCK */, false) AS is_forgotten,
    v.last_join_topological IS NOT NULL OR stay.ended IS NOT NULL AS was_joined, stay.ended,
    (SELECT purged_upto FROM purged_streams WHERE stream_name = 'events') AS purged_upto
FROM rooms r
LEFT JOIN principals p ON p.name = $2::text
LEFT JOIN memberships m ON m.room_nid = r.room_nid AND m.principal_nid = p.principal_nid
LEFT JOIN visibility v ON v.room_nid = r.room_nid AND v.principal_nid = p.principal_nid
LEFT JOIN state_keys k ON k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = $2::text
LEFT JOIN current_state c ON c.room_nid = r.room_nid AND c.state_key_nid = k.state_key_nid
LEFT JOIN LATERAL (  -- of one who is not joined: the last change that took them out
    SELECT d.stream_ordering AS ended
    FROM state_deltas d
    WHERE d.room_nid = r.room_nid AND d.state_key_nid = k.state_key_nid
        AND (SELECT e.membership = 5 /* JOIN */ FROM events e WHERE e.event_nid = d.prev_event_nid)
    ORDER BY d.stream_ordering DESC
    LIMIT 1
) AS stay ON true
WHERE r.room_id = $1::text
