-- Sent by storage.persist.load.lookups._create. Parameters: $1 int.

SELECT event_id
FROM events
WHERE room_nid = $1::int AND type_nid = 1 /* TYPE_CREATE */ AND state_key_nid = 1 /* KEY_CREATE */
    AND rejected IS NULL
