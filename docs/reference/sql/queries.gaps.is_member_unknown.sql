-- Sent by storage.queries.gaps.refuse_unknown_member. Parameters: $1 text, $2 text.

SELECT EXISTS (
    SELECT
    FROM rooms r
    WHERE r.room_id = $1::text AND r.is_partial AND NOT EXISTS (
        SELECT
        FROM state_keys k
        JOIN current_state c USING (state_key_nid)
        WHERE k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = $2::text AND c.room_nid = r.room_nid
    )
)
