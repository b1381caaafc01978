-- Sent by storage.maintenance.verify.graph.check_order. Parameters: $1 int.

SELECT c.event_id AS child_id, c.topological_ordering AS child, p.event_id AS parent_id,
    p.topological_ordering AS parent
FROM events c
CROSS JOIN unnest(prev_nids(c.event_nid, c.prev_events, c.prev_distance)) AS n (event_nid)
JOIN events p ON p.event_nid = n.event_nid
WHERE c.room_nid = $1::int AND NOT c.outlier AND NOT p.outlier
    AND p.topological_ordering >= c.topological_ordering
