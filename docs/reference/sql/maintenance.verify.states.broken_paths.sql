-- Sent by storage.maintenance.verify.states.broken_paths. Parameters: $1 int.

SELECT state_group, encode(path, 'hex') AS path
FROM state_groups
WHERE room_nid = $1::int AND path IS NOT NULL AND CASE
        WHEN octet_length(path) = 0 OR get_byte(path, 0) & 7 NOT BETWEEN 1 AND 4 THEN true
        WHEN get_byte(path, 0) > 4 AND octet_length(path) = 1 THEN true
        ELSE (octet_length(path) - 1) % (get_byte(path, 0) & 7) <> 0
    END
ORDER BY state_group
