-- Sent by storage.maintenance.state_group_gc.make_roots. Parameters: $1 bigint, $2 int, $3 bigint.

WITH entry AS (
    SELECT s.state_key_nid, s.event_nid, k.type_nid = 2 /* TYPE_MEMBER */ AS is_member
    FROM state_entries($1::bigint) AS s
    JOIN state_keys k USING (state_key_nid)
)
UPDATE state_groups
SET back = '{0}',
    path = NULL,
    runs = $2::int,
    digest = $3::bigint,
    key_nid = NULL,
    member_key_nid = NULL,
    event_nid = NULL,
    key_nids = NULLIF(ARRAY(SELECT state_key_nid FROM entry WHERE NOT is_member
        ORDER BY state_key_nid), '{}'),
    event_nids = NULLIF(ARRAY(SELECT event_nid FROM entry WHERE NOT is_member
        ORDER BY state_key_nid), '{}'),
    member_key_nids = NULLIF(ARRAY(SELECT state_key_nid FROM entry WHERE is_member
        ORDER BY state_key_nid), '{}'),
    member_event_nids = NULLIF(ARRAY(SELECT event_nid FROM entry WHERE is_member
        ORDER BY state_key_nid), '{}')
WHERE state_group = $1::bigint
