-- Sent by storage.queries.sharing.shared_rooms. Parameters: $1 text, $2 text.

SELECT r.room_id
FROM state_keys one
JOIN state_keys other ON other.type_nid = 2 /* TYPE_MEMBER */ AND other.state_key = $2::text
JOIN current_state c ON c.state_key_nid = one.state_key_nid AND c.membership = 5 /* JOIN */
JOIN current_state d ON d.state_key_nid = other.state_key_nid AND d.room_nid = c.room_nid
    AND d.membership = 5 /* JOIN */
JOIN rooms r ON r.room_nid = c.room_nid
WHERE one.type_nid = 2 /* TYPE_MEMBER */ AND one.state_key = $1::text
