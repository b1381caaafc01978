-- Sent by storage.maintenance.purge.history._walk. Parameters: $1 int, $2 bigint, $3 bigint, $4
-- bigint, $5 text.

SELECT e.event_nid, e.event_id, e.topological_ordering, e.stream_ordering, e.type_nid,
    e.state_key_nid IS NOT NULL AS is_state,
    e.rejected IS NOT NULL AS is_rejected, e.soft_failed, e.ineffective, e.backfilled, s.local,
        prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events
FROM (
    SELECT *
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
        AND (topological_ordering, stream_ordering) < ($2::bigint, $3::bigint)
    ORDER BY topological_ordering DESC, stream_ordering DESC
    LIMIT $4::bigint
) AS e
CROSS JOIN LATERAL (
    SELECT substr(p.name, strpos(p.name, ':') + 1) = $5::text AS local
    FROM principals p
    WHERE p.principal_nid = e.sender_nid
    OFFSET 0
) AS s
ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
