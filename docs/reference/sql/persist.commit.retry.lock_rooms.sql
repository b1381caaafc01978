-- Sent by storage.persist.commit.retry.WriteAttempts and storage.persist.room_lock.lock_room and
-- storage.persist.room_lock.lock_room_keeping_plans. Parameters: $1 text[].

SELECT pg_advisory_xact_lock(1919905645 /* LOCK_ROOM */, room_nid)
FROM (SELECT room_nid FROM rooms WHERE room_id = ANY($1::text[]) ORDER BY room_nid) AS ordered
