-- Sent by storage.queries.members.memberships_of. Parameters: $1 text, $2 smallint[], $3 boolean.

SELECT r.room_id, m.membership
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = $1::text AND m.membership = ANY($2::smallint[])
    AND NOT (m.forgotten AND m.membership < 3 /* KNOCK */)
UNION ALL  -- of another server: as far as the current state of a room has it
SELECT r.room_id, c.membership
FROM state_keys k
JOIN current_state c USING (state_key_nid)
JOIN rooms r USING (room_nid)
WHERE NOT $3::boolean AND k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = $1::text
    AND c.membership = ANY($2::smallint[])
