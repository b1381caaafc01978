-- Sent by storage.queries.inspect.lines.edges. Parameters: $1 text.

WITH origin AS MATERIALIZED (
    SELECT prev_nids(event_nid, prev_events, prev_distance) AS prev_events, auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) AS auth_events
    FROM events
    WHERE event_id = $1::text
),
edge AS MATERIALIZED (
    SELECT 'prev' AS kind, p.event_nid, p.place
    FROM origin
    CROSS JOIN unnest(origin.prev_events) WITH ORDINALITY AS p (event_nid, place)
    UNION ALL
    SELECT 'auth', p.event_nid, p.place
    FROM origin
    CROSS JOIN unnest(origin.auth_events) WITH ORDINALITY AS p (event_nid, place)
)
SELECT edge.kind, COALESCE(e.event_id, m.event_id) AS event_id,
    e.event_nid IS NOT NULL AS is_stored
FROM edge
LEFT JOIN events e ON e.event_nid = edge.event_nid
LEFT JOIN missing_events m ON m.event_nid = edge.event_nid
ORDER BY edge.kind DESC, edge.place
