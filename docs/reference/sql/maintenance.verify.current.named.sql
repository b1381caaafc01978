-- Sent by storage.maintenance.verify.current.CurrentReplay. Parameters: $1 int, $2 bigint[].

SELECT e.event_nid, e.stream_ordering,
    COALESCE(e.state_group_after, e.state_group_before) AS state_group,
    e.rejected IS NULL AND NOT e.soft_failed AND NOT e.backfilled AS may_end, e.backfilled,
    e.event_id, prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events
FROM unnest($2::bigint[]) AS n (event_nid)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = n.event_nid OFFSET 0) AS e
WHERE e.room_nid = $1::int AND NOT e.outlier
