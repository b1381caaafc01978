-- Sent by storage.rebuild.run.Rebuilder. Parameters: $1 int.

UPDATE events e
SET outlier = e.stream_ordering IS NULL,
    depth = CASE WHEN e.stream_ordering IS NULL THEN COALESCE(e.depth, 0) ELSE e.depth END,
    topological_ordering = CASE WHEN e.stream_ordering IS NOT NULL
        THEN COALESCE(e.topological_ordering, 1) END,
    state_group_before = CASE WHEN e.stream_ordering IS NOT NULL
        THEN COALESCE(e.state_group_before, 0) END,
    audience = CASE WHEN e.stream_ordering IS NOT NULL THEN COALESCE(e.audience, 0) END
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS i
WHERE e.event_nid = i.event_nid AND (
    e.outlier <> (e.stream_ordering IS NULL) OR e.outlier <> (e.topological_ordering IS NULL)
    OR e.outlier <> (e.state_group_before IS NULL) OR e.outlier <> (e.audience IS NULL)
    OR COALESCE(e.depth, e.topological_ordering) IS NULL
)
