-- Sent by storage.maintenance.purge.visibility_cleanup.remove_unused_visibility. Parameters: $1
-- int.

WITH
used AS (
    SELECT range_agg(int8range(u.audience, u.audience + 1)) AS audiences
    FROM (
        SELECT audience FROM events WHERE room_nid = $1::int AND NOT outlier
        UNION
        SELECT audience FROM state_groups WHERE room_nid = $1::int
        UNION
        SELECT current_audience FROM rooms WHERE room_nid = $1::int
    ) AS u
),
lowest AS (
    SELECT topological_ordering
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
    ORDER BY topological_ordering, stream_ordering
    LIMIT 1
)
SELECT v.principal_nid, v.audiences::text AS audiences, v.last_join_topological
FROM whole_visibility v
CROSS JOIN LATERAL (
    SELECT name FROM principals WHERE principal_nid = v.principal_nid OFFSET 0
) AS p
WHERE v.room_nid = $1::int AND (p.name LIKE '@%' OR v.audiences = v.invited_audiences)
    AND v.principal_nid > 2 /* PRINCIPAL_SHARED */ AND v.joined_count = 0 AND v.invited_count = 0
    AND NOT v.audiences && COALESCE((SELECT audiences FROM used), '{}')
    AND (v.last_join_topological IS NULL
        OR v.last_join_topological < (SELECT topological_ordering FROM lowest))
ORDER BY v.principal_nid
