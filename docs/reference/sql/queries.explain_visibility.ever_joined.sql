-- Sent by storage.queries.explain_visibility._ever_joined. Parameters: $1 int, $2 text, $3 bigint.

WITH
known AS MATERIALIZED (  -- by the visibility table; it also knows of history that was purged
    SELECT EXISTS (
        SELECT
        FROM principals p
        JOIN whole_visibility s USING (principal_nid)
        WHERE p.name = $2::text AND s.room_nid = $1::int AND s.audiences <> s.invited_audiences
    ) AS ever
),
joins AS MATERIALIZED (  -- where the table denies it: among the latest events
    SELECT e.event_nid
    FROM (
        SELECT e.event_nid, e.state_key_nid, e.membership, e.rejected
        FROM events e
        WHERE e.room_nid = $1::int AND NOT e.outlier AND NOT (SELECT ever FROM known)
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $3::bigint
    ) AS e
    JOIN state_keys k USING (state_key_nid)
    WHERE e.membership = 5 /* JOIN */ AND e.rejected IS NULL
        AND substr(k.state_key, strpos(k.state_key, ':') + 1) = $2::text
)
SELECT (SELECT ever FROM known) OR CASE
    WHEN EXISTS (SELECT FROM joins) THEN EXISTS (
        SELECT
        FROM state_groups g
        CROSS JOIN LATERAL own_entries(g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS m
        JOIN joins ON joins.event_nid = m.event_nid
        WHERE g.room_nid = $1::int AND m.is_member
    )
    ELSE false
END
