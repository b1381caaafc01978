-- Sent by storage.rebuild.shared.return_groups. Parameters: $1 bigint[].

UPDATE state_groups g
SET room_nid = own.room_nid
FROM (
    SELECT s.state_group, min(e.room_nid) AS room_nid
    FROM state_groups s
    CROSS JOIN LATERAL own_entries(s.key_nids, s.event_nids, s.member_key_nids, s.member_event_nids, s.key_nid, s.member_key_nid, s.event_nid) AS x
    JOIN events e ON e.event_nid = x.event_nid
    WHERE s.state_group = ANY($1::bigint[])
    GROUP BY s.state_group
    HAVING min(e.room_nid) = max(e.room_nid)
) AS own
WHERE g.state_group = own.state_group
    AND g.room_nid <> own.room_nid
    AND NOT EXISTS (
        SELECT
        FROM state_path(g.state_group) AS step
        LEFT JOIN state_groups p ON p.state_group = step.part
        WHERE step.part <> g.state_group AND p.room_nid IS DISTINCT FROM own.room_nid
    )
RETURNING g.state_group
