-- Sent by storage.maintenance.verify.event_columns.check_contents. Parameters: $1 bigint[].

SELECT e.event_nid, e.event_id, e.encoding, e.redacted_form, e.redacted_by, e.outlier, e.json,
    t.type, p.name AS sender, k.state_key,
    k.type_nid AS key_type_nid, e.type_nid,
    claimed_depth(e.depth, e.topological_ordering) AS depth, e.origin_server_ts, e.membership,
        prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events, auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4) AS auth_events,
    e.relates_to, x.type AS rel_type, e.replaces, e.has_url, e.describes_room,
    is_out_of_band(e) AS is_out_of_band, e.rejected IS NOT NULL AS is_rejected
FROM events e
LEFT JOIN event_types t USING (type_nid)
LEFT JOIN event_types x ON x.type_nid = e.rel_type_nid
LEFT JOIN principals p ON p.principal_nid = e.sender_nid
LEFT JOIN state_keys k USING (state_key_nid)
WHERE e.event_nid = ANY($1::bigint[])
