-- Sent by storage.queries.sliding.room_state._present. Parameters: $1 int[].

WITH room AS MATERIALIZED (
    SELECT w.room_nid, e.event_nid, EXISTS (
            SELECT FROM current_state x WHERE x.room_nid = w.room_nid
                AND x.state_key_nid = 13 /* KEY_ENCRYPTION */
        ) AS is_encrypted,
        COALESCE(e.describes_room, false) AS has_type
    FROM unnest($1::int[]) AS w (room_nid)
    LEFT JOIN current_state c ON c.room_nid = w.room_nid AND c.state_key_nid = 1 /* KEY_CREATE */
    LEFT JOIN events e ON e.event_nid = c.event_nid
)
SELECT array_agg(room_nid) AS room_nids, event_nid IS NOT NULL AS is_known, is_encrypted,
    NULL AS room_version, NULL AS event_id, false AS is_redacted, NULL::bytea AS json
FROM room
WHERE NOT has_type
GROUP BY 2, 3
UNION ALL
SELECT ARRAY[r.room_nid], true, r.is_encrypted, i.room_version, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form, e.json
FROM room r
JOIN rooms i USING (room_nid)
JOIN events e USING (event_nid)
WHERE r.has_type
