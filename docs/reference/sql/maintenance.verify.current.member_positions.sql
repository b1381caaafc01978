-- Sent by storage.maintenance.verify.current.check_member_positions and
-- storage.rebuild.client_positions.repair_member_positions. Parameters: $1 int.

SELECT p.name AS user_id, m.stream_ordering AS found, d.stream_ordering AS expected,
    m.writer_nid AS found_writer, COALESCE(d.writer_nid, e.writer_nid) AS expected_writer
FROM memberships m
JOIN principals p USING (principal_nid)
JOIN state_keys k ON k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = p.name
CROSS JOIN LATERAL (
    SELECT stream_ordering, writer_nid
    FROM state_deltas
    WHERE room_nid = m.room_nid AND state_key_nid = k.state_key_nid
    ORDER BY stream_ordering DESC
    LIMIT 1
) AS d
LEFT JOIN LATERAL (
    SELECT writer_nid
    FROM events
    WHERE stream_ordering = m.stream_ordering AND room_nid = m.room_nid
    OFFSET 0
) AS e ON m.stream_ordering > d.stream_ordering
LEFT JOIN LATERAL (
    SELECT true AS is_fact
    FROM outlier_memberships o
    JOIN events x ON x.event_nid = o.event_nid
    WHERE o.stream_id = m.stream_ordering AND x.room_nid = m.room_nid
    OFFSET 0
) AS f ON m.stream_ordering > d.stream_ordering
WHERE m.room_nid = $1::int AND m.event_nid <> 0
    AND (
        m.stream_ordering < d.stream_ordering
        OR (m.stream_ordering > d.stream_ordering AND e.writer_nid IS NULL AND f.is_fact IS NULL)
        OR (m.stream_ordering = d.stream_ordering AND m.writer_nid <> d.writer_nid)
        OR m.writer_nid <> e.writer_nid
    )
ORDER BY 1
