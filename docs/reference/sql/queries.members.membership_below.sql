-- Sent by storage.queries.members.membership. Parameters: $1 room_id text, $2 topological bigint,
-- $3 stream bigint, $4 live bigint, $5 user_id text.

WITH
room AS MATERIALIZED (SELECT room_nid FROM rooms WHERE room_id = $1::text),
last AS MATERIALIZED (  -- the state after the last event at or below the position
    SELECT COALESCE(e.state_group_after, e.state_group_before) AS state_group
    FROM room r
    JOIN events e USING (room_nid)
    WHERE NOT e.outlier AND e.rejected IS NULL AND NOT e.soft_failed
        AND (e.topological_ordering, e.stream_ordering) <= ($2::bigint, $3::bigint)
        AND (e.backfilled OR e.stream_ordering <= $4::bigint)
    ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT 1
),
key AS MATERIALIZED (
    SELECT state_key_nid FROM state_keys WHERE type_nid = 2 /* TYPE_MEMBER */ AND state_key = $5::text
)
SELECT COALESCE((
        SELECT e.membership
        FROM (  -- the last row of the path that has the key
            SELECT own.event_nid
            FROM last
            CROSS JOIN key
            CROSS JOIN LATERAL state_path(last.state_group) AS step
            JOIN state_groups g ON g.state_group = step.part
            CROSS JOIN LATERAL (
                SELECT own_entry(key.state_key_nid, true, g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS event_nid
            ) AS own
            WHERE own.event_nid IS NOT NULL
            ORDER BY step.place DESC
            LIMIT 1
        ) AS member
        JOIN events e USING (event_nid)
    ), 0) AS membership, NULL::bigint AS purged_upto
FROM room
