-- Sent by storage.rebuild.swap._dependent. Parameters: $1 int, $2 bigint[].

WITH RECURSIVE
edge AS MATERIALIZED (
    SELECT s.event_nid, named.event_nid AS needed_nid
    FROM pg_temp.events s
    CROSS JOIN unnest(prev_nids(s.event_nid, s.prev_events, s.prev_distance) || auth_nids(s.event_nid, s.auth_events, s.auth_distance_1, s.auth_distance_2, s.auth_distance_3, s.auth_distance_4)) AS named (event_nid)
    WHERE s.room_nid = $1::int
),
dependent AS (
    SELECT event_nid FROM unnest($2::bigint[]) AS root (event_nid)
    UNION
    SELECT edge.event_nid FROM dependent d JOIN edge ON edge.needed_nid = d.event_nid
)
SELECT s.event_nid
FROM dependent
JOIN pg_temp.events s USING (event_nid)
WHERE NOT s.outlier
