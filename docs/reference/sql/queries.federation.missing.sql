-- Sent by storage.queries.federation.missing_events. Parameters: $1 room_id text, $2 earliest
-- text[], $3 latest text[], $4 limit int, $5 min_depth bigint, $6 server_name text, $7 rows_max
-- int.

WITH
server AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $6::text),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, v.*
    FROM server
    CROSS JOIN rooms r
    CROSS JOIN LATERAL visibility_of(r.room_nid, server.principal_nid) AS v
    WHERE r.room_id = $1::text AND ($6::text IS NULL OR NOT r.is_partial)
),
found AS MATERIALIZED (
    SELECT walk.event_nid
    FROM room r
    CROSS JOIN LATERAL events_between(r.room_nid, ARRAY(
        SELECT e.event_nid
        FROM unnest($2::text[]) WITH ORDINALITY AS one (id, place)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS e
        ORDER BY one.place
    ), ARRAY(
        SELECT e.event_nid
        FROM unnest($3::text[]) WITH ORDINALITY AS one (id, place)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS e
        ORDER BY one.place
    ), $4::int, $5::bigint, $7::int) AS walk (event_nid)
)
SELECT $6::text IS NOT NULL AND (
        NOT server_sees(e, room.own_audiences, room.shared_audiences, room.world_audiences,
            room.reader_nid, room.unread)
        OR (NOT was_there(e, room.joined_since, room.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, room.reader_nid, room.unread))
    ) AS withheld,
    e.event_nid, e.event_id, room.room_id, room.room_version,
    e.stream_ordering, e.topological_ordering,
    claimed_depth(e.depth, e.topological_ordering) AS depth,
    CASE WHEN e.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = e.redacted_by) END AS redacted_by,
    e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding,
    e.json
FROM room
CROSS JOIN found
JOIN events e USING (event_nid)
WHERE $6::text IS NULL
    OR server_gets(e, room.joined_audiences, room.world_audiences, room.reader_nid, room.unread)
ORDER BY e.topological_ordering ASC, e.stream_ordering ASC
