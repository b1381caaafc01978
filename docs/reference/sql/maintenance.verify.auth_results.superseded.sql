-- Sent by storage.maintenance.verify.auth_results.wrongly_superseded. Parameters: $1 int.

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
    CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = named.event_nid OFFSET 0) AS e
    CROSS JOIN unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS n (event_nid)
    WHERE NOT e.outlier AND (e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled)
)
SELECT e.event_id, e.superseded IS TRUE AS found, n.event_nid IS NOT NULL AS expected
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
LEFT JOIN named n USING (event_nid)
WHERE e.refused IS NOT NULL
    AND e.superseded IS TRUE <> (n.event_nid IS NOT NULL)
    AND NOT (e.superseded IS TRUE  -- the events that superseded it may be purged
        AND EXISTS (SELECT FROM purge_jobs j WHERE j.room_nid = $1::int))
ORDER BY e.event_id
