-- Sent by storage.maintenance.partial_state.positions._with_dependent. Parameters: $1 int.

SELECT event_nid, event_id, rejected IS NOT NULL AS is_rejected, auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) AS named
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier AND NOT is_out_of_band(events)
    OFFSET 0
) AS e
