-- Sent by storage.maintenance.purge.references.References. Parameters: $1 int, $2 bigint, $3
-- bigint.

SELECT e.event_nid, e.topological_ordering, e.stream_ordering, e.backfilled, e.redacted_by,
    e.type_nid = 7 /* TYPE_REDACTION */ AND e.rejected IS NULL AND NOT e.soft_failed AS is_redaction,
    prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS going,
    CASE WHEN e.rejected IS NULL THEN '{}' ELSE auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4) END AS cited
FROM events e
WHERE e.room_nid = $1::int AND NOT e.outlier AND e.stream_ordering > $2::bigint
    AND e.stream_ordering <= $3::bigint
ORDER BY e.stream_ordering
