-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

DELETE FROM dropped_extremities o
WHERE o.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.dropped_extremities s WHERE s.room_nid = $2::int AND s.event_nid = o.event_nid)
