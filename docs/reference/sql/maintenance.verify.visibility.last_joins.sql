-- Sent by storage.maintenance.verify.visibility.check_visibility_counts. Parameters: $1 int, $2
-- text.

SELECT k.state_key AS user_id, max(e.topological_ordering) AS topological_ordering
FROM events e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE e.room_nid = $1::int
    AND e.membership = 5 /* JOIN */
    AND NOT e.outlier
    AND NOT e.soft_failed
    AND e.rejected IS NULL
    AND substr(k.state_key, strpos(k.state_key, ':') + 1) = $2::text
GROUP BY k.state_key
