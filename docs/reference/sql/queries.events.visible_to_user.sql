-- Sent by storage.queries.events.visible_to_user. Parameters: $1 text, $2 text[].

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
        AND user_sees(e, s.joined_since, s.own_audiences, s.shared_audiences, s.world_audiences, s.shared_before, s.reader_nid, s.unread)
    OFFSET 0
) AS visible
