-- Sent by storage.queries.room_info._some_rooms. Parameters: $1 text[].

SELECT r.room_id, r.room_version, r.joined_count, r.invited_count, entry.state_key_nid,
    entry.event_id, entry.redacted_by, entry.redacted_form, entry.json
FROM rooms r
LEFT JOIN LATERAL (
    SELECT c.state_key_nid, e.event_id, e.redacted_by, e.redacted_form, e.json
    FROM current_state c
    LEFT JOIN events e USING (event_nid)
    WHERE c.room_nid = r.room_nid
        AND c.state_key_nid = ANY(ARRAY[
            1 /* KEY_CREATE */, 4 /* KEY_JOIN_RULES */, 5 /* KEY_HISTORY_VISIBILITY */, 9 /* KEY_NAME */, 10 /* KEY_TOPIC */,
            11 /* KEY_CANONICAL_ALIAS */, 12 /* KEY_AVATAR */, 13 /* KEY_ENCRYPTION */, 14 /* KEY_GUEST_ACCESS */,
            16 /* KEY_TOMBSTONE */
        ])
    OFFSET 0  -- room by room: otherwise the states of all rooms could be read
) AS entry ON true
WHERE r.room_id = ANY($1::text[])
