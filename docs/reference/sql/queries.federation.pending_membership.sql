-- Sent by storage.queries.federation.pending_membership. Parameters: $1 text, $2 text.

SELECT e.event_id
FROM rooms r
JOIN principals p ON p.name = $2::text
JOIN memberships m USING (room_nid, principal_nid)
JOIN events e USING (event_nid)
WHERE r.room_id = $1::text AND m.membership IN (3 /* KNOCK */, 4 /* INVITE */)
