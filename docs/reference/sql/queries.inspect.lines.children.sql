-- Sent by storage.queries.inspect.lines.edges. Parameters: $1 text, $2 bigint.

SELECT c.event_id
FROM events p
CROSS JOIN LATERAL (
    SELECT e.event_id, prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events, e.topological_ordering,
        e.stream_ordering
    FROM events e
    WHERE e.room_nid = p.room_nid AND NOT e.outlier
        AND e.topological_ordering > p.topological_ordering
    ORDER BY e.topological_ordering, e.stream_ordering
    LIMIT $2::bigint
) AS c
WHERE p.event_id = $1::text AND p.event_nid = ANY(c.prev_events)
ORDER BY c.topological_ordering, c.stream_ordering
