-- Sent by storage.maintenance.censor._events. Parameters: $1 bigint, $2 bigint, $3 text, $4 bigint.

SELECT e.event_nid, e.event_id, r.room_id, r.room_version, true AS is_due, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid > $1::bigint AND e.event_nid <= $2::bigint AND e.encoding = 0
    AND (e.sender_nid = (SELECT principal_nid FROM principals WHERE name = $3::text)
        OR e.state_key_nid = (SELECT state_key_nid FROM state_keys
            WHERE type_nid = 2 /* TYPE_MEMBER */ AND state_key = $3::text))
ORDER BY e.event_nid
LIMIT $4::bigint
