-- Sent by storage.maintenance.user_export.run.rooms_of. Parameters: $1 text.

SELECT r.room_id
FROM rooms r
WHERE r.room_nid IN (
        SELECT c.room_nid
        FROM current_state c
        JOIN state_keys k USING (state_key_nid)
        WHERE k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = $1::text
        UNION
        SELECT m.room_nid
        FROM memberships m
        JOIN principals p USING (principal_nid)
        WHERE p.name = $1::text
    )
ORDER BY r.room_id
