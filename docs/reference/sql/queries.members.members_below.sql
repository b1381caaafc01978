-- Sent by storage.queries.members.members. Parameters: $1 room_id text, $2 topological bigint, $3
-- stream bigint, $4 live bigint, $5 wanted smallint, $6 unwanted smallint.

WITH
room AS MATERIALIZED (SELECT room_nid, room_version FROM rooms WHERE room_id = $1::text),
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
member AS (
    SELECT s.event_nid
    FROM last
    CROSS JOIN state_entries(last.state_group) AS s
)
SELECT r.room_version, NULL::bigint AS purged_upto,
    e.event_id, e.stream_ordering, e.topological_ordering,
    CASE WHEN e.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = e.redacted_by) END AS redacted_by,
    e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.json
FROM room r
LEFT JOIN (
    member m
    JOIN events e ON e.event_nid = m.event_nid AND e.membership IS NOT NULL
        AND ($5::smallint IS NULL OR e.membership = $5::smallint)
        AND ($6::smallint IS NULL OR e.membership <> $6::smallint)
) ON true
