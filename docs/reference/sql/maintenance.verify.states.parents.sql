-- Sent by storage.maintenance.verify.states.check_current_group and
-- storage.maintenance.verify.states._parents. Parameters: $1 bigint[].

SELECT event_nid, event_id, stream_ordering, topological_ordering, state_group_before,
    state_group_after,
    state_key_nid, soft_failed, rejected, prev_nids(event_nid, prev_events, prev_distance) AS prev_events
FROM events
WHERE event_nid = ANY($1::bigint[]) AND NOT outlier
