-- Sent by storage.queries.events.visible_to_server. Parameters: $1 text, $2 text[].

WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid
)
SELECT visible.event_id
FROM reader
CROSS JOIN unnest($2::text[]) AS one (id)
CROSS JOIN LATERAL (
    SELECT e.event_id
    FROM events e
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS s
    WHERE e.event_id = one.id
        AND server_sees(e, s.own_audiences, s.shared_audiences, s.world_audiences, s.reader_nid,
            s.unread)
        AND server_gets(e, s.joined_audiences, s.world_audiences, s.reader_nid, s.unread)
        AND (was_there(e, s.joined_since, s.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, s.reader_nid, s.unread))
        -- nor any event of a room whose members are not all known
        AND NOT EXISTS (SELECT FROM partial_rooms p WHERE p.room_nid = e.room_nid)
    OFFSET 0
) AS visible
