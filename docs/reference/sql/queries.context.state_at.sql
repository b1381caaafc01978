-- Sent by storage.queries.context._state_at. Parameters: $1 event_id text, $2 types text[], $3
-- not_types text[], $4 senders text[], $5 not_senders text[], $6 contains_url boolean.

SELECT path.state_group, path.is_lost
    OR (entry.event_nid IS NOT NULL AND s.event_nid IS NULL) AS is_lost,
    s.event_nid, s.event_id, r.room_id, r.room_version,
    s.stream_ordering, s.topological_ordering,
    claimed_depth(s.depth, s.topological_ordering) AS depth,
    CASE WHEN s.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = s.redacted_by) END AS redacted_by,
    s.rejected, s.soft_failed, s.outlier, s.redacted_form, s.encoding,
    s.json
FROM events e
JOIN rooms r USING (room_nid)
CROSS JOIN filter_of($2::text[], $3::text[], $4::text[], $5::text[], $6::boolean) AS f
CROSS JOIN LATERAL (
    SELECT w.state_group, bool_or(g.state_group IS NULL) AS is_lost
    FROM (SELECT COALESCE(e.state_group_after, e.state_group_before) AS state_group) AS w
    LEFT JOIN LATERAL state_path(w.state_group) AS step ON true
    LEFT JOIN state_groups g ON g.state_group = step.part
    GROUP BY w.state_group
) AS path
LEFT JOIN LATERAL state_entries(path.state_group) AS entry ON true
LEFT JOIN events s ON s.event_nid = entry.event_nid
WHERE e.event_id = $1::text
    AND (s.event_nid IS NULL
        OR is_wanted(s, f.types, f.not_types, f.senders, f.not_senders, f.contains_url))
