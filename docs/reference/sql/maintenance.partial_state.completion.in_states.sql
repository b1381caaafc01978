-- Sent by storage.maintenance.partial_state.completion._take_out. Parameters: $1 int, $2 bigint[].

WITH
used AS (
    SELECT state_group_before AS state_group
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND event_nid <> ALL($2::bigint[])
    UNION
    SELECT state_group_after
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND event_nid <> ALL($2::bigint[])
),
path AS (
    SELECT DISTINCT step.part AS state_group
    FROM used
    CROSS JOIN LATERAL state_path(used.state_group) AS step
)
SELECT DISTINCT e.event_id
FROM path
JOIN state_groups g USING (state_group)
CROSS JOIN LATERAL own_entries(g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS i
JOIN events e ON e.event_nid = i.event_nid
WHERE i.event_nid = ANY($2::bigint[])
