-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

INSERT INTO dropped_extremities (room_nid, event_nid)
SELECT $1::int, event_nid
FROM pg_temp.dropped_extremities
WHERE room_nid = $2::int
ON CONFLICT DO NOTHING
