-- Sent by storage.maintenance.repair.run.repair_group_facts. Parameters: $1 int.

UPDATE state_groups g
SET key_nids = i.key_nids,
    event_nids = i.event_nids,
    member_key_nids = i.member_key_nids,
    member_event_nids = i.member_event_nids,
    key_nid = i.key_nid,
    member_key_nid = i.member_key_nid
FROM (
    SELECT g.state_group,
        array_agg(x.state_key_nid) FILTER (WHERE g.event_nid IS NULL AND k.type_nid <> 2)
            AS key_nids,
        array_agg(x.event_nid) FILTER (WHERE g.event_nid IS NULL AND k.type_nid <> 2)
            AS event_nids,
        array_agg(x.state_key_nid) FILTER (WHERE g.event_nid IS NULL AND k.type_nid = 2)
            AS member_key_nids,
        array_agg(x.event_nid) FILTER (WHERE g.event_nid IS NULL AND k.type_nid = 2)
            AS member_event_nids,
        min(x.state_key_nid) FILTER (WHERE g.event_nid IS NOT NULL AND k.type_nid <> 2) AS key_nid,
        min(x.state_key_nid) FILTER (WHERE g.event_nid IS NOT NULL AND k.type_nid = 2)
            AS member_key_nid
    FROM state_groups g
    CROSS JOIN LATERAL own_entries(g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS x
    JOIN state_keys k ON k.state_key_nid = x.state_key_nid
    WHERE g.room_nid = $1::int
    GROUP BY g.state_group
    HAVING bool_or((k.type_nid = 2) <> x.is_member)
) AS i
WHERE g.state_group = i.state_group
