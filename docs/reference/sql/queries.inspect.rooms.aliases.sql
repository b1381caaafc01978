-- Sent by storage.queries.inspect.rooms.rooms_by_alias. Parameters: $1 bigint.

SELECT r.room_id, r.room_version, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form AS hidden, e.json
FROM (
    SELECT c.room_nid, c.event_nid
    FROM current_state c
    WHERE c.state_key_nid = 11 /* KEY_CANONICAL_ALIAS */
    ORDER BY c.room_nid
    LIMIT $1::bigint
) AS c
CROSS JOIN LATERAL (  -- one by one: few events are aliases
    SELECT e.event_id, e.redacted_by, e.redacted_form, e.json
    FROM events e
    WHERE e.event_nid = c.event_nid
    OFFSET 0
) AS e
JOIN rooms r ON r.room_nid = c.room_nid
