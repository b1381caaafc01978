-- Sent by storage.maintenance.partial_state.positions.put_back. Parameters: $1 bigint[].

UPDATE events e
SET after_gap = NULLIF(correct.is_after_gap, false)
FROM (
    SELECT x.event_nid, EXISTS (
        SELECT
        FROM unnest(prev_nids(x.event_nid, x.prev_events, x.prev_distance)) AS n (event_nid)
        LEFT JOIN events p ON p.event_nid = n.event_nid AND p.room_nid = x.room_nid
            AND p.stream_ordering < x.stream_ordering
        WHERE p.event_nid IS NULL
    ) AS is_after_gap
    FROM events x
    WHERE x.event_nid = ANY($1::bigint[]) AND NOT x.outlier AND NOT x.backfilled
) AS correct
WHERE e.event_nid = correct.event_nid
    AND COALESCE(e.after_gap, false) <> correct.is_after_gap
