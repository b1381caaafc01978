-- Sent by storage.rebuild.run.Rebuilder. Parameters: $1 text.

UPDATE state_groups
SET path = NULL,
    back = '{-2147483647, 0}'
WHERE room_nid IN (SELECT room_nid FROM rooms WHERE room_id = $1::text) AND path IS NOT NULL AND CASE
        WHEN octet_length(path) = 0 OR get_byte(path, 0) & 7 NOT BETWEEN 1 AND 4 THEN true
        WHEN get_byte(path, 0) > 4 AND octet_length(path) = 1 THEN true
        ELSE (octet_length(path) - 1) % (get_byte(path, 0) & 7) <> 0
    END
