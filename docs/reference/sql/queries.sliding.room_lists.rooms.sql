-- Sent by storage.queries.sliding.room_lists.RoomLists. Parameters: $1 text.

SELECT m.room_nid, r.room_id, m.membership::int AS membership,
    COALESCE(CASE WHEN m.membership = 5 /* JOIN */ THEN r.last_stream_ordering END, m.stream_ordering)
        AS activity,
    m.event_nid AS member_nid,
    CASE WHEN m.membership < 3 /* KNOCK */ THEN EXISTS (
        SELECT FROM events e WHERE e.event_nid = m.event_nid AND e.sender_nid <> m.principal_nid
    ) ELSE false END AS was_kicked,
    CASE WHEN m.membership < 5 /* JOIN */ THEN EXISTS (
        SELECT FROM visibility v
        WHERE v.room_nid = m.room_nid AND v.principal_nid = m.principal_nid
            AND v.last_join_topological IS NOT NULL
    ) ELSE true END AS was_joined,
    m.forgotten AND m.membership < 3 /* KNOCK */ AS is_forgotten,
    CASE WHEN m.membership = 4 /* INVITE */ THEN (
        SELECT i.name
        FROM events e
        JOIN principals i ON i.principal_nid = e.sender_nid
        WHERE e.event_nid = m.event_nid
    ) END AS inviter
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = $1::text
