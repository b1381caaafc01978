-- Sent by storage.rebuild.swap._keep_columns. Parameters: $1 bigint[].

UPDATE pg_temp.events s
SET relates_to = e.relates_to, rel_type_nid = e.rel_type_nid, replaces = e.replaces, has_url = e.has_url, describes_room = e.describes_room, event_id = e.event_id, membership = e.membership, origin_server_ts = e.origin_server_ts, redacted_form = e.redacted_form, sender_nid = e.sender_nid, state_key_nid = e.state_key_nid, type_nid = e.type_nid
FROM (
    SELECT event_nid, relates_to, rel_type_nid, replaces, has_url, describes_room, event_id, membership, origin_server_ts, redacted_form, sender_nid, state_key_nid, type_nid
    FROM events
    WHERE event_nid = ANY($1::bigint[])
) AS e
WHERE s.event_nid = e.event_nid
