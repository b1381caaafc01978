-- Sent by storage.queries.state_at.rooms_of. Parameters: $1 text.

SELECT r.room_id
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = $1::text AND m.membership = 5 /* JOIN */
ORDER BY r.room_id
