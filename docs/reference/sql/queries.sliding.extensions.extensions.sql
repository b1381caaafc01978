-- Sent by storage.queries.sliding.extensions.read_extensions. Parameters: $1 user_id text, $2
-- device_id text, $3 to_device_after bigint, $4 to_device_writers text[], $5 to_device_positions
-- bigint[], $6 messages_max bigint, $7 data_after bigint, $8 data_writers text[], $9 data_positions
-- bigint[], $10 data_live boolean, $11 data_rooms int[], $12 data_rooms_after bigint[], $13
-- receipts_after bigint, $14 receipts_writers text[], $15 receipts_positions bigint[], $16
-- receipt_rooms int[], $17 late_receipt_rooms int[], $18 late_receipts_after bigint[], $19
-- new_receipt_rooms int[], $20 event_ids text[].

WITH
reader AS MATERIALIZED (
    SELECT principal_nid FROM principals WHERE name = $1::text
),
message AS (
    SELECT d.stream_id, d.content
    FROM reader
    CROSS JOIN LATERAL (
        SELECT d.stream_id, d.content
        FROM to_device d
        JOIN writers w USING (writer_nid)
        LEFT JOIN unnest($4::text[], $5::bigint[]) AS a (instance_name, stream_id)
            USING (instance_name)
        WHERE d.principal_nid = reader.principal_nid AND d.device_id = $2::text
            -- compared as rows, so that only the index by device fits
            AND (d.principal_nid, d.device_id, d.stream_id)
                > (reader.principal_nid, $2::text, $3::bigint)
            AND d.stream_id > COALESCE(a.stream_id, $3::bigint)
        ORDER BY d.principal_nid, d.device_id, d.stream_id
        LIMIT $6::bigint
    ) AS d
),
data AS (
    SELECT a.*
    FROM reader
    JOIN account_data a USING (principal_nid)
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($8::text[], $9::bigint[]) AS s (instance_name, stream_id)
        USING (instance_name)
    WHERE a.stream_id > $7::bigint AND a.stream_id > COALESCE(s.stream_id, $7::bigint)
        AND (a.room_nid = 0 OR $10::boolean) AND a.room_nid <> ALL($11::int[])
    UNION ALL
    SELECT a.*
    FROM reader
    CROSS JOIN unnest($11::int[], $12::bigint[]) AS n (room_nid, after)
    CROSS JOIN LATERAL (
        SELECT * FROM account_data
        WHERE principal_nid = reader.principal_nid AND room_nid = n.room_nid
            AND stream_id > n.after
        OFFSET 0
    ) AS a
),
receipt AS (
    SELECT c.*
    FROM unnest($16::int[]) AS n (room_nid)
    CROSS JOIN LATERAL (
        SELECT * FROM receipts
        WHERE room_nid = n.room_nid AND stream_id > $13::bigint
        OFFSET 0
    ) AS c
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($14::text[], $15::bigint[]) AS s (instance_name, stream_id)
        USING (instance_name)
    WHERE c.stream_id > COALESCE(s.stream_id, $13::bigint)
    UNION ALL
    SELECT c.*
    FROM unnest($17::int[], $18::bigint[]) AS n (room_nid, after)
    CROSS JOIN LATERAL (
        SELECT * FROM receipts
        WHERE room_nid = n.room_nid AND stream_id > n.after
        OFFSET 0
    ) AS c
    UNION ALL  -- of rooms that are new to the client: on its events, and those of the user
    SELECT c.*
    FROM reader
    CROSS JOIN unnest($19::int[]) AS n (room_nid)
    CROSS JOIN LATERAL (
        SELECT * FROM receipts
        WHERE room_nid = n.room_nid
            AND (principal_nid = reader.principal_nid OR event_id = ANY($20::text[]))
        OFFSET 0
    ) AS c
)
SELECT 'message' AS kind, stream_id, NULL::int AS room_nid, NULL AS room_id, NULL AS type,
    NULL AS user_id, NULL AS thread_id, NULL AS event_id, content
FROM message
UNION ALL
SELECT 'account_data', d.stream_id, NULLIF(d.room_nid, 0), r.room_id, t.type, NULL, NULL, NULL,
    d.content
FROM data d
JOIN event_types t USING (type_nid)
-- one by one: a join could hash all rooms, and below all principals
LEFT JOIN LATERAL (
    SELECT room_id FROM rooms WHERE room_nid = d.room_nid OFFSET 0
) AS r ON true
UNION ALL
SELECT 'receipts', c.stream_id, c.room_nid, r.room_id, c.receipt_type, p.name,
    NULLIF(c.thread_id, ''), c.event_id, c.data
FROM receipt c
CROSS JOIN LATERAL (SELECT room_id FROM rooms WHERE room_nid = c.room_nid OFFSET 0) AS r
CROSS JOIN LATERAL (
    SELECT name FROM principals WHERE principal_nid = c.principal_nid OFFSET 0
) AS p
WHERE c.receipt_type <> 'm.read.private' OR p.name = $1::text
ORDER BY 2
