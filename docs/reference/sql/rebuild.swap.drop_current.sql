-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

DELETE FROM current_state o
WHERE o.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.current_state s WHERE s.room_nid = $2::int AND s.state_key_nid = o.state_key_nid)
