-- Sent by storage.queries.pagination.page.exact. Parameters: $1 room_id text, $2 event_id text, $3
-- tokens int[], $4 least bigint[], $5 furthest bigint[], $6 writer_tokens int[], $7 writers text[],
-- $8 writer_positions bigint[].

WITH
room AS MATERIALIZED (
    SELECT room_nid FROM rooms WHERE room_id = $1::text
    UNION ALL
    SELECT room_nid FROM events WHERE event_id = $2::text
),
writer AS MATERIALIZED (  -- of each token, the writers that are further than the others
    SELECT *
    FROM unnest($6::int[], $7::text[], $8::bigint[]) AS p (token, instance_name, stream_id)
)
SELECT t.token, COALESCE(late.before, late.last, t.least) AS live
FROM unnest($3::int[], $4::bigint[], $5::bigint[]) AS t (token, least, furthest)
CROSS JOIN room r
-- the last event that it covers, not its furthest position: events that commit later come after it
CROSS JOIN LATERAL (
    SELECT min(e.stream_ordering)
        FILTER (WHERE e.stream_ordering > COALESCE(p.stream_id, t.least)) - 1 AS before,
            max(e.stream_ordering) AS last
    FROM events e
    JOIN writers w USING (writer_nid)
    LEFT JOIN writer p ON p.token = t.token AND p.instance_name = w.instance_name
    -- so that only an index by room fits (sync/rooms.py)
    WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, t.least)
        AND (e.room_nid, e.stream_ordering) <= (r.room_nid, t.furthest)
        AND e.room_nid BETWEEN r.room_nid AND r.room_nid
        AND NOT e.outlier AND NOT e.backfilled
) AS late
