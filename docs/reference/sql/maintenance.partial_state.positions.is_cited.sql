-- Sent by storage.maintenance.partial_state.positions._with_dependent. Parameters: $1 int, $2
-- bigint[].

SELECT EXISTS (
    SELECT
    FROM (
        SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
        UNION ALL
        SELECT * FROM events WHERE room_nid = $1::int AND outlier AND NOT is_out_of_band(events)
        OFFSET 0
    ) AS e
    CROSS JOIN unnest(auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4)) AS cited (event_nid)
    WHERE cited.event_nid = ANY($2::bigint[]) AND e.event_nid <> ALL($2::bigint[])
)
