-- Sent by storage.queries.federation.event_auth. Parameters: $1 text.

WITH RECURSIVE
start AS MATERIALIZED (
    SELECT event_nid, room_nid, auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) AS auth_events
    FROM events
    WHERE event_id = $1::text
),
-- within the room: a refused event may cite events of other rooms, which its sender may not get
chain (event_nid) AS (
    SELECT unnest(auth_events)
    FROM start
    UNION
    SELECT cited.event_nid
    FROM chain
    CROSS JOIN start
    CROSS JOIN LATERAL (
        SELECT * FROM events
        WHERE event_nid = chain.event_nid AND room_nid + 0 = start.room_nid OFFSET 0
    ) AS e
    CROSS JOIN unnest(auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4)) AS cited (event_nid)
)
SELECT s.*
FROM start
CROSS JOIN LATERAL (SELECT start.event_nid UNION ALL SELECT event_nid FROM chain) AS wanted
-- one by one: the planner expects a long chain, and would read all rooms
CROSS JOIN LATERAL (
    SELECT s.*
    FROM events e
    JOIN stored_events s USING (event_nid)
    WHERE e.event_nid = wanted.event_nid AND e.room_nid = start.room_nid
    OFFSET 0
) AS s
ORDER BY s.depth, s.event_nid
