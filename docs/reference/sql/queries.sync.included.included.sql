-- Sent by storage.queries.sync.included._facts. Parameters: $1 user_id text, $2 device_id text, $3
-- reads_receipts boolean, $4 reads_account_data boolean, $5 receipts_after bigint, $6
-- receipts_writers text[], $7 receipts_positions bigint[], $8 receipts_way text, $9 whole_rooms
-- int[], $10 of_no_room boolean, $11 has_since boolean, $12 data_after bigint, $13 data_writers
-- text[], $14 data_positions bigint[], $15 messages_after bigint, $16 messages_writers text[], $17
-- messages_positions bigint[], $18 rooms text[], $19 not_rooms text[], $20 left_rooms int[], $21
-- messages_max bigint.

WITH
reader AS MATERIALIZED (
    SELECT principal_nid FROM principals WHERE name = $1::text
),
new_receipt AS (
    SELECT c.*
    FROM receipts c
    WHERE $8::text = 'by position' AND c.stream_id > $5::bigint
    UNION ALL
    SELECT c.*
    FROM reader u
    JOIN memberships m USING (principal_nid)
    CROSS JOIN LATERAL (
        -- compared as rows, so that only the index by room fits
        SELECT c.* FROM receipts c
            WHERE c.room_nid = m.room_nid
                AND (c.room_nid, c.stream_id) > (m.room_nid, $5::bigint)
            OFFSET 0
    ) AS c
    WHERE $8::text = 'by room' AND m.membership = 5 /* JOIN */
),
receipt AS (
    SELECT c.*
    FROM new_receipt c
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($6::text[], $7::bigint[]) AS a (instance_name, after)
        USING (instance_name)
    WHERE c.stream_id > COALESCE(a.after, $5::bigint) AND c.room_nid <> ALL($9::int[])
    UNION ALL
    SELECT c.*
    FROM receipts c
    WHERE $3::boolean AND c.room_nid = ANY($9::int[])
),
new_data AS (
    SELECT d.*
    FROM reader u
    CROSS JOIN LATERAL (
        SELECT d.* FROM account_data d
            WHERE d.principal_nid = u.principal_nid AND d.stream_id > $12::bigint OFFSET 0
    ) AS d
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($13::text[], $14::bigint[]) AS a (instance_name, after)
        USING (instance_name)
    WHERE $4::boolean AND d.stream_id > COALESCE(a.after, $12::bigint)
),
data AS (
    SELECT * FROM new_data
    WHERE CASE WHEN room_nid = 0 THEN $10::boolean
        ELSE $11::boolean AND room_nid <> ALL($9::int[] || $20::int[]) END
    UNION ALL
    SELECT d.*
    FROM reader u
    JOIN account_data d USING (principal_nid)
    WHERE $4::boolean AND d.room_nid = ANY($9::int[] || $20::int[])
),
message AS (
    SELECT d.stream_id, d.content
    FROM reader u
    CROSS JOIN LATERAL (
        SELECT d.stream_id, d.content
        FROM to_device d
        JOIN writers w USING (writer_nid)
        LEFT JOIN unnest($16::text[], $17::bigint[]) AS a (instance_name, after)
            USING (instance_name)
        WHERE d.principal_nid = u.principal_nid AND d.device_id = $2::text
            -- compared as rows, so that only the index by device fits
            AND (d.principal_nid, d.device_id, d.stream_id)
                > (u.principal_nid, $2::text, $15::bigint)
            AND d.stream_id > COALESCE(a.after, $15::bigint)
        ORDER BY d.principal_nid, d.device_id, d.stream_id
        LIMIT $21::bigint
    ) AS d
    WHERE $10::boolean
),
fact AS (
    SELECT 'receipt' AS kind, c.room_nid, c.stream_id, c.receipt_type AS name, o.name AS user_id,
        NULLIF(c.thread_id, '') AS thread_id, c.event_id, c.data AS content
    FROM receipt c
    CROSS JOIN reader u
    JOIN principals o ON o.principal_nid = c.principal_nid
    WHERE c.principal_nid = u.principal_nid
        OR ($3::boolean AND c.receipt_type <> 'm.read.private')
    UNION ALL
    SELECT 'account_data', d.room_nid, d.stream_id, t.type, NULL, NULL, NULL, d.content
    FROM data d
    JOIN event_types t USING (type_nid)
    UNION ALL
    SELECT 'to_device', 0, stream_id, '', NULL, NULL, NULL, content
    FROM message
)
SELECT f.kind, r.room_id, m.membership::int AS membership, f.stream_id, f.name, f.user_id,
    f.thread_id, f.event_id, f.content
FROM fact f
CROSS JOIN reader u
LEFT JOIN rooms r ON r.room_nid = f.room_nid
LEFT JOIN LATERAL (  -- one by one: a join could read all memberships of the user
    SELECT membership, forgotten
    FROM memberships
    WHERE principal_nid = u.principal_nid AND room_nid = f.room_nid
    OFFSET 0
) AS m ON f.room_nid <> 0
WHERE f.room_nid = 0 OR (
    CASE WHEN m.membership < 3 /* KNOCK */ THEN f.kind = 'account_data' AND NOT m.forgotten
        ELSE m.membership = 5 /* JOIN */ END
    AND ($18::text[] IS NULL OR r.room_id = ANY($18::text[])) AND r.room_id <> ALL($19::text[])
)
ORDER BY f.stream_id
