-- Sent by storage.maintenance.verify.graph.check_after_gaps and
-- storage.rebuild.client_positions.repair_after_gaps. Parameters: $1 int.

SELECT e.event_id, COALESCE(e.after_gap, false) AS found, correct.expected
FROM events e
CROSS JOIN LATERAL (
    SELECT NOT e.backfilled AND EXISTS (
        SELECT
        FROM unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS n (event_nid)
        LEFT JOIN events p ON p.event_nid = n.event_nid AND p.room_nid = e.room_nid
            AND COALESCE(p.arrival_ordering, p.stream_ordering)
                < COALESCE(e.arrival_ordering, e.stream_ordering)
        WHERE p.event_nid IS NULL
    )
) AS correct (expected)
WHERE e.room_nid = $1::int AND NOT e.outlier AND COALESCE(e.after_gap, false) <> correct.expected
