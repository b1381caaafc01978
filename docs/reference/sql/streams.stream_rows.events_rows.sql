-- Sent by storage.streams.stream_rows.events. Parameters: $1 bigint, $2 bigint, $3 text, $4 bigint.

SELECT e.stream_ordering AS stream_id, w.instance_name, e.event_id, r.room_id, t.type, k.state_key,
    CASE WHEN e.type_nid = 7 /* TYPE_REDACTION */ THEN e.json END AS json
FROM (  -- limited before it is joined, or each page would join all that is left
    SELECT stream_ordering, writer_nid, event_id, room_nid, type_nid, state_key_nid, json
    FROM events
    WHERE stream_ordering > $1::bigint AND stream_ordering <= $2::bigint AND NOT backfilled
        AND ($3::text IS NULL
            OR writer_nid = (SELECT writer_nid FROM writers WHERE instance_name = $3::text))
    ORDER BY stream_ordering
    LIMIT $4::bigint
) e
JOIN writers w USING (writer_nid)
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
UNION ALL
SELECT o.stream_id, w.instance_name, o.event_id, r.room_id, t.type, k.state_key, NULL
FROM (
    SELECT m.stream_id, m.writer_nid, e.event_id, e.room_nid, e.type_nid, e.state_key_nid
    FROM outlier_memberships m
    JOIN events e USING (event_nid)
    WHERE m.stream_id > $1::bigint AND m.stream_id <= $2::bigint
        AND ($3::text IS NULL
            OR m.writer_nid = (SELECT writer_nid FROM writers WHERE instance_name = $3::text))
    ORDER BY m.stream_id
    LIMIT $4::bigint
) o
JOIN writers w USING (writer_nid)
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
JOIN state_keys k ON k.state_key_nid = o.state_key_nid
ORDER BY stream_id
LIMIT $4::bigint
