-- Sent by storage.queries.gaps.unfilled. Parameters: $1 text, $2 text, $3 bigint.

SELECT m.event_id
FROM rooms r
JOIN principals p ON p.name = $2::text
CROSS JOIN LATERAL visibility_of(r.room_nid, p.principal_nid) AS v
JOIN missing_events m ON m.room_nid = r.room_nid
WHERE r.room_id = $1::text AND EXISTS (
    SELECT
    FROM events c
    JOIN principals s ON s.principal_nid = c.sender_nid
    WHERE c.event_nid = ANY(m.child_nids) AND c.received_ts >= $3::bigint
        AND NOT (c.type_nid = 2 /* TYPE_MEMBER */ AND substr(s.name, strpos(s.name, ':') + 1) = $2::text)
        AND NOT EXISTS (
            SELECT
            FROM purge_jobs j
            WHERE j.room_nid = c.room_nid AND j.started_ts >= c.received_ts
        )
        AND (was_there(c, v.joined_since, v.joined_audiences)
            OR was_there_before(c, v.reader_nid, v.unread))
)
