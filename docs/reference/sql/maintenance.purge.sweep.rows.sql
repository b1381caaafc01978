-- Sent by storage.maintenance.purge.sweep._sweep. Parameters: $1 bigint[].

SELECT e.event_nid, e.event_id, e.topological_ordering, e.stream_ordering, e.type_nid,
    e.state_key_nid IS NOT NULL AS is_state,
    e.rejected IS NOT NULL AS is_rejected, e.soft_failed, e.ineffective, e.backfilled,
        false AS local, prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events
FROM events e
WHERE e.event_nid = ANY($1::bigint[]) AND NOT e.outlier
