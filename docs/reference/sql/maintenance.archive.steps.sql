-- Sent by storage.maintenance.archive.archive. Parameters: $1 bigint.

SELECT event_nid, is_readmission
FROM (
    SELECT o.event_nid, c.position, false AS is_readmission, o.is_second
    FROM (
        SELECT event_nid, COALESCE(starts_with(rejected, 'create.second'), false) AS is_second
        FROM events
        WHERE room_nid = $1::bigint AND outlier
    ) AS o
    LEFT JOIN (
        SELECT max(COALESCE(arrival_ordering, stream_ordering)) AS position
        FROM events
        WHERE room_nid = $1::bigint AND type_nid = 1 /* TYPE_CREATE */
            AND state_key_nid = 1 /* KEY_CREATE */ AND rejected IS NULL
    ) AS c ON o.is_second
    UNION ALL
    SELECT event_nid, COALESCE(arrival_ordering, stream_ordering), false, false FROM events
        WHERE room_nid = $1::bigint AND NOT outlier
    UNION ALL
    SELECT event_nid, stream_ordering, true, false FROM events
        WHERE room_nid = $1::bigint AND NOT outlier AND arrival_ordering IS NOT NULL
) AS e
ORDER BY position NULLS FIRST, is_second, event_nid
