-- Sent by storage.queries.sync.state.later_values. Parameters: $1 room_nids int[], $2 types text[],
-- $3 keys text[], $4 shown bigint[], $5 upper bigint[].

SELECT i.room_nid, i.type, i.state_key
FROM unnest($1::int[], $2::text[], $3::text[], $4::bigint[], $5::bigint[])
    AS i (room_nid, type, state_key, shown, upper)
CROSS JOIN LATERAL (
    SELECT k.state_key_nid
    FROM event_types t
    JOIN state_keys k USING (type_nid)
    WHERE t.type = i.type AND k.state_key = i.state_key
    OFFSET 0
) AS k
CROSS JOIN LATERAL (
    SELECT e.stream_ordering
    FROM events e
    WHERE e.event_nid = COALESCE((
        SELECT COALESCE(d.prev_event_nid, 0)
        FROM state_deltas d
        WHERE d.room_nid = i.room_nid AND d.state_key_nid = k.state_key_nid
            AND d.stream_ordering > i.upper
        ORDER BY d.stream_ordering
        LIMIT 1
    ), (SELECT c.event_nid FROM current_state c
        WHERE c.room_nid = i.room_nid AND c.state_key_nid = k.state_key_nid))
    OFFSET 0
) AS value
WHERE value.stream_ordering > i.shown
