-- Sent by storage.maintenance.repair.run.drop_doubled. Parameters: $1 int, $2 bigint[].

WITH
named AS (
    SELECT n.event_nid
    FROM events e
    CROSS JOIN unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance) || auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4)) AS n (event_nid)
    WHERE e.room_nid = $1::int AND (e.outlier OR NOT e.outlier) AND n.event_nid = ANY($2::bigint[])
    UNION
    SELECT x.event_nid
    FROM state_groups g
    CROSS JOIN LATERAL own_entries(g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS x
    WHERE g.room_nid = $1::int AND x.event_nid = ANY($2::bigint[])
)
SELECT e.event_nid, e.event_nid IN (SELECT event_nid FROM named) AS is_named
FROM events e
WHERE e.event_nid = ANY($2::bigint[]) AND e.room_nid = $1::int
-- the row that the others are copies of
ORDER BY is_named DESC, e.event_nid IN (
    SELECT event_nid FROM memberships WHERE room_nid = $1::int
) DESC, e.outlier, e.stream_ordering, e.event_nid
