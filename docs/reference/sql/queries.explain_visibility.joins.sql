-- Sent by storage.queries.explain_visibility._facts. Parameters: $1 int, $2 text, $3 bigint, $4
-- bigint.

WITH
member AS MATERIALIZED (
    SELECT state_key_nid FROM state_keys WHERE type_nid = 2 /* TYPE_MEMBER */ AND state_key = $2::text
),
present AS MATERIALIZED (
    SELECT EXISTS (
        SELECT FROM current_state c
        JOIN member USING (state_key_nid)
        WHERE c.room_nid = $1::int AND c.membership = 5 /* JOIN */
    ) AS is_joined
),
known AS MATERIALIZED (  -- the last join, where the visibility table says
    SELECT e.event_id
    FROM principals p
    JOIN visibility v ON v.principal_nid = p.principal_nid AND v.room_nid = $1::int
    JOIN events e ON e.room_nid = v.room_nid AND NOT e.outlier
        AND e.topological_ordering = v.last_join_topological
    JOIN member USING (state_key_nid)
    WHERE p.name = $2::text AND e.topological_ordering > $3::bigint AND e.membership = 5 /* JOIN */
        AND NOT e.soft_failed AND e.rejected IS NULL
    LIMIT 1
)
SELECT present.is_joined,
    COALESCE((SELECT event_id FROM known), (
        SELECT e.event_id
        FROM (
            SELECT e.event_id, e.state_key_nid, e.membership, e.soft_failed, e.rejected
            FROM events e
            WHERE e.room_nid = $1::int AND NOT e.outlier AND e.topological_ordering > $3::bigint
                AND NOT (present.is_joined OR EXISTS (SELECT FROM known))
            ORDER BY e.topological_ordering, e.stream_ordering
            LIMIT $4::bigint
        ) AS e
        JOIN member USING (state_key_nid)
        WHERE e.membership = 5 /* JOIN */ AND NOT e.soft_failed AND e.rejected IS NULL
        LIMIT 1
    )) AS join_id
FROM present
