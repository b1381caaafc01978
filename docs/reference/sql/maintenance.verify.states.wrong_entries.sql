-- Sent by storage.maintenance.verify.states.check_groups. Parameters: $1 bigint[].

SELECT g.state_group, x.state_key_nid, x.event_nid, x.is_member, e.event_id,
    e.event_id IS NULL AND x.event_nid <> 0 AS is_lost,
    COALESCE(e.room_nid <> g.room_nid OR e.state_key_nid IS DISTINCT FROM x.state_key_nid,
        false) AS is_other,
    k.state_key_nid IS NULL AS is_nameless,
        (k.type_nid = 2 /* TYPE_MEMBER */) IS DISTINCT FROM x.is_member AS is_misplaced,
    x.occurrences > 1 AS is_repeated
FROM state_groups g
CROSS JOIN LATERAL (
    SELECT own.*, count(*) OVER (PARTITION BY own.state_key_nid) AS occurrences
    FROM own_entries(g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS own
) AS x
LEFT JOIN state_keys k ON k.state_key_nid = x.state_key_nid
LEFT JOIN events e ON e.event_nid = x.event_nid
WHERE g.state_group = ANY($1::bigint[])
    AND (
        (e.event_id IS NULL AND x.event_nid <> 0)
        OR e.room_nid <> g.room_nid
        OR (e.event_id IS NOT NULL AND e.state_key_nid IS DISTINCT FROM x.state_key_nid)
        OR (k.type_nid = 2 /* TYPE_MEMBER */) IS DISTINCT FROM x.is_member
        OR x.occurrences > 1
    )
