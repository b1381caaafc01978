-- Sent by storage.maintenance.repair.reauthorise._affected. Parameters: $1 int, $2 bigint[].

WITH
holding AS (
    SELECT g.state_group
    FROM state_groups g
    CROSS JOIN LATERAL own_entries(g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS x
    WHERE g.room_nid = $1::int AND x.event_nid = ANY($2::bigint[])
),
used AS (
    SELECT state_group_before AS state_group FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION
    SELECT state_group_after FROM events WHERE room_nid = $1::int AND NOT outlier
),
affected AS (
    SELECT DISTINCT u.state_group
    FROM used u
    CROSS JOIN LATERAL state_path(u.state_group) AS step
    JOIN holding h ON h.state_group = step.part
)
SELECT e.event_nid
FROM events e
WHERE e.room_nid = $1::int AND NOT e.outlier
    AND (e.state_group_before IN (SELECT state_group FROM affected)
        OR e.state_group_after IN (SELECT state_group FROM affected))
