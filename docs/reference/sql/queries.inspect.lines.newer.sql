-- Sent by storage.queries.inspect.lines.window. Parameters: $1 text, $2 bigint, $3 bigint, $4
-- bigint.

SELECT e.event_nid, e.event_id, r.room_id, t.type, k.state_key, s.name AS sender,
    e.stream_ordering, e.topological_ordering,
    claimed_depth(e.depth, e.topological_ordering) AS depth, e.origin_server_ts, e.received_ts,
    e.membership, e.outlier, e.backfilled, e.soft_failed, e.ineffective, e.redacted_form,
    e.redacted_by IS NOT NULL AS is_redacted, e.rejected, e.refused,
    octet_length(e.json) AS stored_bytes, edges.prev_events,
    ARRAY(
        SELECT m.event_nid FROM missing_events m WHERE m.event_nid = ANY(edges.prev_events)
    ) AS missing_parents
FROM (
    SELECT e.*
    FROM events e
    WHERE e.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text)
        AND NOT e.outlier
        AND (e.topological_ordering, e.stream_ordering) > ($2::bigint, $3::bigint)
    ORDER BY e.topological_ordering ASC, e.stream_ordering ASC
    LIMIT $4::bigint
) AS e
CROSS JOIN LATERAL (SELECT prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events) AS edges
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
JOIN principals s ON s.principal_nid = e.sender_nid
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
ORDER BY e.topological_ordering ASC NULLS LAST, e.stream_ordering ASC, e.event_nid
