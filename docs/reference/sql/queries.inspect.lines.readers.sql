-- Sent by storage.queries.inspect.lines.readers. Parameters: $1 text, $2 bigint.

SELECT p.name AS user_id,
    COALESCE(user_sees(e, s.joined_since, s.own_audiences, s.shared_audiences, s.world_audiences, s.shared_before, s.reader_nid, s.unread), false) AS is_visible
FROM events e
CROSS JOIN LATERAL (
    SELECT v.principal_nid
    FROM visibility v
    WHERE v.room_nid = e.room_nid AND v.principal_nid > 2 /* PRINCIPAL_SHARED */
    ORDER BY v.principal_nid
    LIMIT $2::bigint
) AS v
JOIN principals p USING (principal_nid)
CROSS JOIN LATERAL visibility_of(e.room_nid, v.principal_nid) AS s
WHERE e.event_id = $1::text AND starts_with(p.name, '@')
ORDER BY p.name
