-- Sent by storage.maintenance.purge.references.References. Parameters: $1 int, $2 bigint, $3
-- bigint, $4 bigint, $5 bigint.

SELECT e.event_nid, e.topological_ordering, e.stream_ordering, e.backfilled, e.redacted_by,
    e.type_nid = 7 /* TYPE_REDACTION */ AND e.rejected IS NULL AND NOT e.soft_failed AS is_redaction,
    ARRAY(
        SELECT n.event_nid
        FROM unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS n (event_nid)
        CROSS JOIN LATERAL (SELECT x.topological_ordering FROM events x
            WHERE x.event_nid = n.event_nid OFFSET 0) AS p
        WHERE p.topological_ordering < $4::bigint
    ) AS going,
    CASE WHEN e.rejected IS NULL THEN '{}' ELSE auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4) END AS cited
FROM (
    SELECT *
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
        AND (topological_ordering, stream_ordering) > ($2::bigint, $3::bigint)
    ORDER BY topological_ordering, stream_ordering
    LIMIT $5::bigint
) AS e
ORDER BY e.topological_ordering, e.stream_ordering
