-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

INSERT INTO current_state AS o (room_nid, event_nid, state_key_nid, membership)
SELECT $1::int, event_nid, state_key_nid, membership
FROM pg_temp.current_state
WHERE room_nid = $2::int
ON CONFLICT (room_nid, state_key_nid) DO UPDATE SET event_nid = EXCLUDED.event_nid, membership = EXCLUDED.membership
    WHERE (o.event_nid, o.membership) IS DISTINCT FROM (EXCLUDED.event_nid, EXCLUDED.membership)
