-- Sent by storage.rebuild.client_positions.repair_member_positions. Parameters: $1 int, $2 text[].

UPDATE memberships m
SET stream_ordering = d.stream_ordering,
    writer_nid = d.writer_nid
FROM unnest($2::text[]) AS i (user_id)
JOIN principals p ON p.name = i.user_id
JOIN state_keys k ON k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = i.user_id
CROSS JOIN LATERAL (
    SELECT stream_ordering, writer_nid
    FROM state_deltas
    WHERE room_nid = $1::int AND state_key_nid = k.state_key_nid
    ORDER BY stream_ordering DESC
    LIMIT 1
) AS d
WHERE m.room_nid = $1::int AND m.principal_nid = p.principal_nid
