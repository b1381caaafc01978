-- Sent by storage.persist.load.lookups._joined_to_any. Parameters: $1 text, $2 text, $3 text[].

SELECT EXISTS (
    SELECT
    FROM unnest($3::text[]) AS wanted (room_id)
    CROSS JOIN (SELECT state_key_nid FROM state_keys
        WHERE type_nid = 2 /* TYPE_MEMBER */ AND state_key = $1::text OFFSET 0) AS k
    CROSS JOIN (SELECT principal_nid FROM principals WHERE name = $2::text OFFSET 0) AS p
    CROSS JOIN LATERAL (SELECT room_nid FROM rooms WHERE room_id = wanted.room_id OFFSET 0) AS r
    CROSS JOIN LATERAL (SELECT membership FROM current_state
        WHERE room_nid = r.room_nid AND state_key_nid = k.state_key_nid OFFSET 0) AS c
    -- the state of a room that this server has left may be out of date
    CROSS JOIN LATERAL (SELECT joined_count FROM visibility
        WHERE room_nid = r.room_nid AND principal_nid = p.principal_nid OFFSET 0) AS v
    WHERE c.membership = 5 /* JOIN */ AND v.joined_count > 0
)
