-- Sent by storage.rebuild.client_positions.repair_deltas. Parameters: $1 int, $2 text, $3 boolean.

WITH
fact AS MATERIALIZED (
    SELECT nextval('events_stream') AS stream_id, w.writer_nid
    FROM writers w
    WHERE w.instance_name = $2::text
),
delta AS (
    INSERT INTO state_deltas (stream_ordering, event_nid, prev_event_nid, room_nid, state_key_nid,
        writer_nid)
    SELECT f.stream_id, c.event_nid, o.event_nid, $1::int, state_key_nid, f.writer_nid
    FROM fact f
    CROSS JOIN (
        (SELECT state_key_nid, event_nid FROM current_state WHERE room_nid = $1::int) AS c
        FULL JOIN (
            SELECT DISTINCT ON (state_key_nid) state_key_nid, event_nid
            FROM state_deltas
            WHERE room_nid = $1::int
            ORDER BY state_key_nid, stream_ordering DESC
        ) AS o USING (state_key_nid)
    )
    WHERE c.event_nid IS DISTINCT FROM o.event_nid
        AND (o.state_key_nid IS NOT NULL OR NOT $3::boolean)
    RETURNING state_key_nid
),
member AS (  -- their syncs get the room by this position
    UPDATE memberships m
    SET stream_ordering = f.stream_id,
        writer_nid = f.writer_nid
    FROM fact f
    CROSS JOIN delta d
    JOIN state_keys k USING (state_key_nid)
    JOIN principals p ON p.name = k.state_key
    WHERE m.room_nid = $1::int AND m.principal_nid = p.principal_nid
        AND k.type_nid = 2 /* TYPE_MEMBER */
),
published AS (  -- the fact of the stream: it wakes the syncs of the room
    INSERT INTO outlier_memberships (stream_id, event_nid, writer_nid)
    SELECT f.stream_id, c.event_nid, f.writer_nid
    FROM fact f
    CROSS JOIN (
        SELECT event_nid
        FROM current_state
        WHERE room_nid = $1::int AND membership IS NOT NULL
        ORDER BY state_key_nid
        LIMIT 1
    ) AS c
),
room AS (
    UPDATE rooms
    SET last_stream_ordering = fact.stream_id,
        completed_at = fact.stream_id
    FROM fact
    WHERE room_nid = $1::int
)
UPDATE stream_positions p
SET stream_id = GREATEST(p.stream_id, fact.stream_id)
FROM fact
WHERE p.stream_name = 'events' AND p.instance_name = $2::text
