-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

DELETE FROM audiences o
WHERE o.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.audiences s WHERE s.room_nid = $2::int AND s.audience = o.audience)
