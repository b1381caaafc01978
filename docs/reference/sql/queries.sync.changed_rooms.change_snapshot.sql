-- Sent by storage.queries.sync.changed_rooms.read. Parameters: $1 streams text[], $2 instances
-- text[], $3 seen bigint[], $4 rooms_of text, $5 far bigint.

WITH
writer AS MATERIALIZED (
    SELECT p.stream_name, p.instance_name, p.stream_id, COALESCE(s.stream_id, p.entered_at) AS seen
    FROM stream_positions p
    LEFT JOIN unnest($1::text[], $2::text[], $3::bigint[]) AS s (stream_name, instance_name,
        stream_id) USING (stream_name, instance_name)
    WHERE stream_name <> 'backfill'
),
behind AS MATERIALIZED (  -- writers that are ahead of the position seen
    SELECT w.writer_nid, p.seen, p.stream_id
    FROM writer p
    JOIN writers w USING (instance_name)
    WHERE p.stream_name = 'events' AND p.stream_id > p.seen
),
unseen_range AS MATERIALIZED (
    SELECT min(seen) AS above, max(stream_id) AS upto,
        max(stream_id) - min(seen) > $5::bigint AS is_far
    FROM behind
    HAVING count(*) > 0
),
unseen AS (
    SELECT f.room_nid
    FROM (
        SELECT e.room_nid, e.stream_ordering, e.writer_nid
        FROM unseen_range s
        JOIN events e ON e.stream_ordering > s.above AND e.stream_ordering <= s.upto
        WHERE NOT s.is_far AND NOT e.backfilled
        UNION ALL
        SELECT e.room_nid, o.stream_id, o.writer_nid
        FROM unseen_range s
        JOIN outlier_memberships o ON o.stream_id > s.above AND o.stream_id <= s.upto
        JOIN events e USING (event_nid)
        WHERE NOT s.is_far
    ) AS f
    JOIN behind b ON b.writer_nid = f.writer_nid AND f.stream_ordering > b.seen
)
SELECT 'writer' AS kind, stream_name, instance_name, stream_id AS position, seen,
    NULL::int[] AS room_nids, NULL::text[] AS room_ids, NULL::bigint[] AS numbers
FROM writer
UNION ALL
SELECT 'unseen', 'events', NULL, upto, NULL, CASE
    WHEN NOT is_far THEN ARRAY(SELECT DISTINCT room_nid FROM unseen) END, NULL, NULL
FROM unseen_range
UNION ALL
SELECT 'unresolved', 'caches', p.instance_name, p.stream_id, p.seen, NULL, NULL, NULL
FROM writer p
WHERE p.stream_name = 'caches' AND p.stream_id > p.seen
    AND (p.stream_id - p.seen > $5::bigint OR EXISTS (
        SELECT FROM cache_invalidations i
        JOIN writers w USING (writer_nid)
        WHERE i.stream_id > p.seen AND i.stream_id <= p.stream_id
            AND w.instance_name = p.instance_name
            AND (i.cache_name IN ('cs_cache_fake', 'rooms_of') )
    ))
UNION ALL
SELECT 'purged', stream_name, NULL, purged_upto, NULL, NULL, NULL, NULL
FROM purged_streams
WHERE stream_name = 'events'
UNION ALL
SELECT 'rooms of', 'events', NULL, max(m.stream_ordering), NULL,
    array_agg(m.room_nid ORDER BY m.room_nid) FILTER (WHERE m.membership = 5 /* JOIN */),
    array_agg(r.room_id ORDER BY m.room_nid) FILTER (WHERE m.membership = 5 /* JOIN */), NULL
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = $4::text
