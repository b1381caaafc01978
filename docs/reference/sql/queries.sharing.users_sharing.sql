-- Sent by storage.queries.sharing.users_sharing. Parameters: $1 text.

SELECT k.state_key
FROM state_keys k
WHERE k.state_key <> $1::text AND k.state_key_nid = ANY(ARRAY(
    SELECT DISTINCT other.state_key_nid
    FROM state_keys me
    JOIN current_state c ON c.state_key_nid = me.state_key_nid AND c.membership = 5 /* JOIN */
    -- room by room: otherwise the members of all rooms could be read for a few of them
    CROSS JOIN LATERAL (
        SELECT m.state_key_nid
        FROM current_state m
        WHERE m.room_nid = c.room_nid AND m.membership = 5 /* JOIN */
        OFFSET 0
    ) AS other
    WHERE me.type_nid = 2 /* TYPE_MEMBER */ AND me.state_key = $1::text
))
