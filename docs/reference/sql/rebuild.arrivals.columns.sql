-- Sent by storage.rebuild.arrivals.stand_in. Parameters: $1 bigint.

SELECT t.type, p.name AS sender, k.state_key, e.membership,
    claimed_depth(e.depth, e.topological_ordering) AS depth, e.origin_server_ts, e.redacted_form,
    prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events, auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4) AS auth_events
FROM events e
JOIN event_types t USING (type_nid)
JOIN principals p ON p.principal_nid = e.sender_nid
LEFT JOIN state_keys k USING (state_key_nid)
WHERE e.event_nid = $1::bigint AND (e.state_key_nid IS NULL) = (k.state_key IS NULL)
