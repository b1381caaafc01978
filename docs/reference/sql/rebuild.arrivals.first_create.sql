-- Sent by storage.rebuild.run._Work. Parameters: $1 int.

SELECT event_nid
FROM events
WHERE room_nid = $1::int AND type_nid = 1 /* TYPE_CREATE */ AND state_key_nid = 1 /* KEY_CREATE */
    AND rejected IS NULL
    AND EXISTS (SELECT FROM events WHERE room_nid = $1::int AND outlier
        AND starts_with(rejected, 'create.second'))
