-- Sent by storage.persist.load.events.load_event_ids. Parameters: $1 text[].

SELECT event_nid, event_id, room_nid, stream_ordering, topological_ordering, claimed_depth(depth, topological_ordering) AS depth, origin_server_ts, state_group_before, state_group_after, audience, redacted_by, sender_nid, type_nid, state_key_nid, membership, outlier, backfilled, soft_failed, redacted_form, rejected, prev_nids(event_nid, prev_events, prev_distance) AS prev_events, auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) AS auth_events, ineffective, refused, superseded
FROM unnest($1::text[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.id OFFSET 0) AS e
