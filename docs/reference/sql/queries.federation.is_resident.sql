-- Sent by storage.queries.federation.is_resident. Parameters: $1 text, $2 text.

SELECT CASE WHEN r.is_partial THEN EXISTS (
        -- in the room before the join, and no user of it has left since
        SELECT
        FROM partial_rooms q
        WHERE q.room_nid = r.room_nid AND $2::text = ANY(q.servers) AND NOT EXISTS (
            SELECT
            FROM current_state c
            JOIN state_keys k USING (state_key_nid)
            WHERE c.room_nid = r.room_nid AND c.membership <> 5 /* JOIN */
                AND substr(k.state_key, strpos(k.state_key, ':') + 1) = $2::text
        )
    ) OR v.is_joined ELSE v.is_joined END
FROM rooms r
CROSS JOIN LATERAL (
    SELECT EXISTS (
        SELECT
        FROM principals p
        JOIN visibility x USING (principal_nid)
        WHERE p.name = $2::text AND x.room_nid = r.room_nid AND x.joined_count > 0
    ) AS is_joined
) AS v
WHERE r.room_id = $1::text
