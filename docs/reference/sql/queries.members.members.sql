-- Sent by storage.queries.members.members. Parameters: $1 room_id text, $2 upto bigint, $3 writers
-- text[], $4 writer_positions bigint[], $5 wanted smallint, $6 unwanted smallint.

WITH
room AS MATERIALIZED (SELECT room_nid, room_version FROM rooms WHERE room_id = $1::text),
covered AS MATERIALIZED (  -- the position in the stream, of each writer
    SELECT w.writer_nid, COALESCE(p.stream_id, $2::bigint) AS upto
    FROM writers w
    LEFT JOIN unnest($3::text[], $4::bigint[]) AS p (instance_name, stream_id)
        USING (instance_name)
),
later AS MATERIALIZED (  -- the keys that changed after the position, with the value before
    SELECT DISTINCT ON (d.state_key_nid) d.state_key_nid, d.prev_event_nid AS event_nid
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > $2::bigint
    JOIN covered USING (writer_nid)
    JOIN state_keys k ON k.state_key_nid = d.state_key_nid AND k.type_nid = 2 /* TYPE_MEMBER */
    WHERE d.stream_ordering > covered.upto
    ORDER BY d.state_key_nid, d.stream_ordering
),
member AS (
    SELECT c.event_nid
    FROM room r
    JOIN current_state c USING (room_nid)
    WHERE c.state_key_nid NOT IN (SELECT state_key_nid FROM later) AND c.membership IS NOT NULL
        AND ($5::smallint IS NULL OR c.membership = $5::smallint)
        AND ($6::smallint IS NULL OR c.membership <> $6::smallint)
    UNION ALL
    SELECT event_nid
    FROM later
)
SELECT r.room_version, (SELECT purged_upto FROM purged_streams WHERE stream_name = 'events') AS purged_upto,
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
