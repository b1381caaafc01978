-- Sent by storage.queries.gaps.own_members. Parameters: $1 text, $2 text.

SELECT k.state_key, e.event_id
FROM rooms r
JOIN current_state c USING (room_nid)
JOIN state_keys k USING (state_key_nid)
JOIN events e ON e.event_nid = c.event_nid
WHERE r.room_id = $1::text AND c.membership <> 5 /* JOIN */
    AND right(k.state_key, length($2::text) + 1) = ':' || $2::text
