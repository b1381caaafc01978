-- Sent by storage.queries.timestamp_to_event.event_near. Parameters: $1 room_id text, $2 reader
-- text, $3 timestamp bigint, $4 rows_max bigint.

WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.out_of_range, r.is_partial, reader.principal_nid, v.*
    FROM reader
    CROSS JOIN rooms r
    CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
    WHERE r.room_id = $1::text
),
limits AS (SELECT -9223372036854775807 - 1 AS furthest_ts),
positions AS MATERIALIZED (
    SELECT p.*
    FROM room
    CROSS JOIN limits
    CROSS JOIN LATERAL in_order_positions(room.room_nid, LEAST($3::bigint, limits.furthest_ts),
        GREATEST($3::bigint, limits.furthest_ts)) AS p
),
last AS MATERIALIZED (  -- the first one that was not read in either order; none: those were all
    SELECT room.room_nid, room.out_of_range, room.principal_nid, e.topological_ordering
    FROM room
    CROSS JOIN positions
    CROSS JOIN LATERAL (
        (
            SELECT e.origin_server_ts AS reached_ts, e.topological_ordering
            FROM (SELECT *
            FROM events e
            WHERE e.room_nid = room.room_nid AND NOT e.outlier AND e.in_order_ts IS NOT NULL
                AND e.origin_server_ts <= $3::bigint
            ORDER BY e.origin_server_ts DESC, e.topological_ordering DESC, e.stream_ordering DESC OFFSET $4::bigint - 1 LIMIT 1) AS e
        )
        UNION ALL
        (
            SELECT COALESCE(e.in_order_ts, e.origin_server_ts), e.topological_ordering
            FROM (SELECT *
            FROM events e
            WHERE e.room_nid = room.room_nid AND NOT e.outlier AND NOT e.backfilled
                AND e.stream_ordering >= positions.first AND e.stream_ordering <= positions.last
            ORDER BY e.stream_ordering DESC OFFSET $4::bigint - 1 LIMIT 1) AS e
        )
        ORDER BY reached_ts DESC
        LIMIT 1
    ) AS e
)
SELECT nearest.withheld, s.*
FROM (
    SELECT e.*
    FROM last
    CROSS JOIN LATERAL topological_ranges_of(last.room_nid, last.principal_nid, last.out_of_range,
        last.topological_ordering, CASE WHEN false THEN 0 ELSE 100 END,
        CASE WHEN false THEN 100 ELSE 0 END) AS part
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
            NOT was_there(e, part.joined_since, part.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, part.reader_nid, part.unread) AS withheld
        FROM (
            SELECT *
            FROM events e
            WHERE e.room_nid = last.room_nid AND NOT e.outlier
                AND e.topological_ordering >= part.lowest AND e.topological_ordering <= part.highest
                AND e.topological_ordering <= last.topological_ordering
            ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
            LIMIT $4::bigint
        ) AS e
        WHERE e.origin_server_ts <= $3::bigint
            AND user_sees(e, part.joined_since, part.own_audiences, part.shared_audiences, part.world_audiences, part.shared_before, part.reader_nid, part.unread)
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT 1
    ) AS e
    ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
