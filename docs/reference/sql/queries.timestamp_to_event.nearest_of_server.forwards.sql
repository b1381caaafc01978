-- Sent by storage.queries.timestamp_to_event.timestamp_to_event. Parameters: $1 room_id text, $2
-- reader text, $3 timestamp bigint, $4 rows_max bigint.

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
out_of_order AS MATERIALIZED (
    SELECT e.*
    FROM room
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.origin_server_ts, e.topological_ordering, e.stream_ordering,
            $2::text IS NOT NULL AND NOT was_there(e, room.joined_since, room.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, room.reader_nid, room.unread) AS withheld
        FROM (SELECT *
        FROM events e
        WHERE e.room_nid = room.room_nid AND NOT e.outlier AND e.in_order_ts IS NOT NULL
            AND e.origin_server_ts >= $3::bigint
        ORDER BY e.origin_server_ts ASC, e.topological_ordering ASC, e.stream_ordering ASC LIMIT $4::bigint) AS e
        WHERE e.rejected IS NULL AND NOT e.soft_failed AND ($2::text IS NULL OR (
            NOT room.is_partial
            AND server_sees(e, room.own_audiences, room.shared_audiences, room.world_audiences,
                room.reader_nid, room.unread)
            AND server_gets(e, room.joined_audiences, room.world_audiences, room.reader_nid, room.unread)
        ))
        ORDER BY e.origin_server_ts ASC, e.topological_ordering ASC, e.stream_ordering ASC
        LIMIT 1
    ) AS e
),
limits AS MATERIALIZED (  -- no event in time order is nearer outside of them
    SELECT COALESCE((SELECT origin_server_ts FROM out_of_order), 9223372036854775807) AS furthest_ts
),
positions AS MATERIALIZED (
    SELECT p.*
    FROM room
    CROSS JOIN limits
    CROSS JOIN LATERAL in_order_positions(room.room_nid, LEAST($3::bigint, limits.furthest_ts),
        GREATEST($3::bigint, limits.furthest_ts)) AS p
),
in_order AS MATERIALIZED (
    SELECT e.*
    FROM room
    CROSS JOIN positions
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.origin_server_ts, e.topological_ordering, e.stream_ordering,
            $2::text IS NOT NULL AND NOT was_there(e, room.joined_since, room.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, room.reader_nid, room.unread) AS withheld
        FROM (SELECT *
        FROM events e
        WHERE e.room_nid = room.room_nid AND NOT e.outlier AND NOT e.backfilled
            AND e.stream_ordering >= positions.first AND e.stream_ordering <= positions.last
        ORDER BY e.stream_ordering ASC LIMIT $4::bigint) AS e
        WHERE e.in_order_ts IS NULL AND e.rejected IS NULL AND NOT e.soft_failed AND ($2::text IS NULL OR (
            NOT room.is_partial
            AND server_sees(e, room.own_audiences, room.shared_audiences, room.world_audiences,
                room.reader_nid, room.unread)
            AND server_gets(e, room.joined_audiences, room.world_audiences, room.reader_nid, room.unread)
        ))
        ORDER BY e.stream_ordering ASC
        LIMIT 1
    ) AS e
)
SELECT nearest.withheld, s.*
FROM (
    SELECT *
    FROM (TABLE in_order UNION ALL TABLE out_of_order) AS e
    ORDER BY e.origin_server_ts ASC, e.topological_ordering ASC, e.stream_ordering ASC
    LIMIT 1
) AS nearest
JOIN stored_events s USING (event_nid)
