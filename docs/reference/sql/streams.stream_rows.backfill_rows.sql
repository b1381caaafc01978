-- Sent by storage.streams.stream_rows.backfill. Parameters: $1 bigint, $2 bigint, $3 text, $4
-- bigint.

SELECT e.stream_ordering AS stream_id, w.instance_name, e.event_id, r.room_id, t.type, k.state_key,
    CASE WHEN e.type_nid = 7 /* TYPE_REDACTION */ THEN e.json END AS json
FROM (  -- limited before it is joined, or each page would join all that is left
    SELECT stream_ordering, writer_nid, event_id, room_nid, type_nid, state_key_nid, json
    FROM events
    WHERE stream_ordering > $1::bigint AND stream_ordering <= $2::bigint AND backfilled
        AND ($3::text IS NULL
            OR writer_nid = (SELECT writer_nid FROM writers WHERE instance_name = $3::text))
    ORDER BY stream_ordering
    LIMIT $4::bigint
) e
JOIN writers w USING (writer_nid)
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
ORDER BY stream_id
LIMIT $4::bigint
