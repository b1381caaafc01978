-- Sent by storage.maintenance.verify.graph.check_gaps. Parameters: $1 int.

WITH RECURSIVE
named AS (  -- by an accepted live event, also through events that can be no extremity
    SELECT n.event_nid
    FROM events e
    CROSS JOIN unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS n (event_nid)
    WHERE e.room_nid = $1::int AND NOT e.outlier AND e.rejected IS NULL AND NOT e.soft_failed
        AND NOT e.backfilled
    UNION
    SELECT n.event_nid
    FROM named
    JOIN events e USING (event_nid)
    CROSS JOIN unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS n (event_nid)
    WHERE NOT e.outlier AND (e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled)
),
gap AS (  -- the expected rows
    SELECT n.event_nid,
        array_agg(DISTINCT c.event_nid ORDER BY c.event_nid) AS child_nids,
        n.event_nid IN (SELECT event_nid FROM named) AS superseded
    FROM events c
    CROSS JOIN unnest(prev_nids(c.event_nid, c.prev_events, c.prev_distance)) AS n (event_nid)
    LEFT JOIN events p ON p.event_nid = n.event_nid
    WHERE c.room_nid = $1::int AND NOT c.outlier AND p.outlier IS NOT FALSE
    GROUP BY n.event_nid
),
found AS (
    SELECT m.event_nid, m.event_id, m.superseded, m.child_nids
    FROM missing_events m
    WHERE m.room_nid = $1::int
)
SELECT event_nid, COALESCE(f.event_id, e.event_id) AS event_id, f.child_nids AS found_nids,
    g.child_nids AS expected_nids,
    f.superseded AS found_superseded, g.superseded AS expected_superseded,
        f.event_id = e.event_id AS same_id
FROM gap g
FULL JOIN found f USING (event_nid)
LEFT JOIN events e USING (event_nid)
WHERE f.event_nid IS NULL
    OR g.event_nid IS NULL
    OR NOT (f.child_nids @> g.child_nids AND g.child_nids @> f.child_nids)
    OR g.superseded > f.superseded
    OR (f.superseded > g.superseded
        AND NOT EXISTS (SELECT FROM purge_jobs j WHERE j.room_nid = $1::int))
    OR f.event_id <> e.event_id
