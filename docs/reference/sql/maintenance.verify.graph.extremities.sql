-- Sent by storage.maintenance.verify.graph.check_extremities. Parameters: $1 int.

WITH RECURSIVE
live AS (
    SELECT event_nid, prev_nids(event_nid, prev_events, prev_distance) AS prev_events
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND rejected IS NULL AND NOT soft_failed
        AND NOT backfilled
),
named AS (
    SELECT n.event_nid
    FROM live
    CROSS JOIN unnest(live.prev_events) AS n (event_nid)
    UNION
    SELECT n.event_nid
    FROM named
    JOIN events e USING (event_nid)
    CROSS JOIN unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS n (event_nid)
    WHERE NOT e.outlier AND (e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled)
)
SELECT l.event_nid
FROM live l
WHERE NOT EXISTS (SELECT FROM named n WHERE n.event_nid = l.event_nid)
    AND NOT EXISTS (SELECT FROM dropped_extremities d
        WHERE d.room_nid = $1::int AND d.event_nid = l.event_nid)
