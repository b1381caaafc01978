-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

DELETE FROM visibility o
WHERE o.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.visibility s WHERE s.room_nid = $2::int AND s.principal_nid = o.principal_nid)
