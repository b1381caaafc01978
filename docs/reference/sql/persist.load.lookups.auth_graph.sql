-- Sent by storage.persist.load.lookups._auth_graph. Parameters: $1 bigint[].

WITH RECURSIVE chain AS (
    SELECT event_nid, auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) AS auth_events
    FROM events
    WHERE event_nid = ANY($1::bigint[])
    UNION
    SELECT e.event_nid, auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4)
    FROM chain c
    CROSS JOIN unnest(c.auth_events) AS parent (event_nid)
    CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = parent.event_nid OFFSET 0) AS e
)
SELECT event_nid, auth_events
FROM chain
