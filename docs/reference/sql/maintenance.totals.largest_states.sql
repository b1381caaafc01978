-- Sent by storage.maintenance.totals.largest_states. Parameters: $1 bigint.

SELECT
    r.room_id,
    r.room_version,
    g.entry_count AS state_entries,
    (SELECT count(*) FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = 5 /* JOIN */) AS joined,
    (SELECT count(*) FROM state_groups s WHERE s.room_nid = r.room_nid) AS state_groups
FROM rooms r
JOIN state_groups g ON g.state_group = r.current_state_group
ORDER BY g.entry_count DESC, r.room_id
LIMIT $1::bigint
