-- Sent by storage.queries.inspect.rooms.rooms_by_id. Parameters: $1 bigint, $2 bigint, $3 text[].

WITH
wanted AS MATERIALIZED (
    SELECT r.room_nid, g.place
        FROM unnest($3::text[]) WITH ORDINALITY AS g (room_id, place)
        JOIN rooms r USING (room_id)
        LIMIT $1::bigint
),
common AS MATERIALIZED (  -- the planner's statistics: rooms with many events
    SELECT unnest(s.most_common_vals::text::int[]) AS room_nid,
        unnest(s.most_common_freqs) AS share
    FROM pg_stats s
    WHERE s.schemaname = current_schema() AND s.tablename = 'events' AND s.attname = 'room_nid'
),
total AS MATERIALIZED (
    SELECT GREATEST(reltuples, 0)::float8 AS events
    FROM pg_class
    WHERE oid = to_regclass('events')
)
SELECT r.room_id, r.room_version, r.joined_count, r.invited_count,
    cardinality(r.forward_extremities) AS extremities,
    (
        SELECT count(*)::int
        FROM (SELECT FROM missing_events m WHERE m.room_nid = r.room_nid LIMIT $2::bigint) AS m
    ) AS gaps,
    (
        SELECT count(*)
        FROM (
            SELECT FROM events e WHERE e.room_nid = r.room_nid AND NOT e.outlier LIMIT $2::bigint
        ) AS e
    ) AS counted_events,
    (c.share * total.events)::bigint AS estimated_events,
    r.max_topological_ordering, r.last_stream_ordering,
    (
        SELECT e.received_ts FROM events e WHERE e.stream_ordering = r.last_stream_ordering
    ) AS last_received_ts,
    r.is_partial
FROM wanted w
JOIN rooms r USING (room_nid)
CROSS JOIN total
LEFT JOIN common c ON c.room_nid = r.room_nid
ORDER BY w.place
