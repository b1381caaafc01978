-- Sent by storage.rebuild.swap._keep_columns. Parameters: $1 bigint[].

UPDATE pg_temp.events s
SET auth_distance_1 = e.auth_distance_1, auth_distance_2 = e.auth_distance_2, auth_distance_3 = e.auth_distance_3, auth_distance_4 = e.auth_distance_4, auth_events = e.auth_events
FROM (
    SELECT event_nid, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4, auth_events
    FROM events
    WHERE event_nid = ANY($1::bigint[])
) AS e
WHERE s.event_nid = e.event_nid
