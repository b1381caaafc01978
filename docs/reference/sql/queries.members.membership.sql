-- Sent by storage.queries.members.membership. Parameters: $1 room_id text, $2 upto bigint, $3
-- writers text[], $4 writer_positions bigint[], $5 user_id text.

WITH
covered AS MATERIALIZED (  -- the position in the stream, of each writer
    SELECT w.writer_nid, COALESCE(p.stream_id, $2::bigint) AS upto
    FROM writers w
    LEFT JOIN unnest($3::text[], $4::bigint[]) AS p (instance_name, stream_id)
        USING (instance_name)
)
SELECT CASE
        WHEN later.room_nid IS NOT NULL THEN COALESCE(e.membership, 0)
        ELSE COALESCE(m.membership, c.membership, 0)
    END AS membership, (SELECT purged_upto FROM purged_streams WHERE stream_name = 'events') AS purged_upto
FROM rooms r
LEFT JOIN state_keys k ON k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key = $5::text
LEFT JOIN current_state c ON c.room_nid = r.room_nid AND c.state_key_nid = k.state_key_nid
LEFT JOIN LATERAL (  -- its first change after the position
    SELECT d.room_nid, d.prev_event_nid
    FROM state_deltas d
    JOIN covered USING (writer_nid)
    WHERE d.room_nid = r.room_nid AND d.stream_ordering > $2::bigint
        AND d.state_key_nid = k.state_key_nid AND d.stream_ordering > covered.upto
    ORDER BY d.stream_ordering
    LIMIT 1
) AS later ON true
LEFT JOIN events e ON e.event_nid = later.prev_event_nid
LEFT JOIN LATERAL (  -- out of band: a membership that is not in the room's state
    SELECT o.membership
    FROM principals p
    JOIN memberships o USING (principal_nid)
    JOIN covered USING (writer_nid)
    WHERE p.name = $5::text AND o.room_nid = r.room_nid AND o.stream_ordering <= covered.upto
        AND (c.room_nid IS NULL OR EXISTS (  -- an invite after all local users have left
            SELECT
            FROM out_of_band_memberships b
            WHERE b.room_nid = o.room_nid AND b.principal_nid = o.principal_nid
                AND b.event_nid = o.event_nid
        ))
) AS m ON true
WHERE r.room_id = $1::text
