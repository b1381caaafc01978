-- Sent by storage.maintenance.verify.event_loader.read_room. Parameters: $1 int.

SELECT event_id, rejected, encoding, json
FROM events
WHERE room_nid = $1::int AND type_nid = 1 /* TYPE_CREATE */ AND state_key_nid = 1 /* KEY_CREATE */
ORDER BY event_id
