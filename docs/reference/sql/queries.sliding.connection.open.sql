-- Sent by storage.queries.sliding.connection.open_connection. Parameters: $1 user_id text, $2
-- device_id text, $3 conn_id text, $4 now_ms bigint, $5 required_states text[], $6 replaced
-- bigint[], $7 too_many bigint[], $8 room_nids int[], $9 sent_upto bigint[], $10 receipts_upto
-- bigint[], $11 account_data_upto bigint[], $12 timeline_limits int[], $13 required_indexes int[],
-- $14 is_direct boolean[].

WITH
known_principal AS (
    SELECT principal_nid FROM principals WHERE name = $1::text
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), $1::text
    WHERE NOT EXISTS (SELECT FROM known_principal)
    RETURNING principal_nid
),
opened AS (  -- in place of the locked one of its key. Of another one: no row
    INSERT INTO sliding_connections AS c (connection_nid, base, last_number, used_ts, principal_nid,
        device_id, conn_id, unconfirmed, required_states)
    SELECT nextval('sliding_connection_nids'), 1, 1, $4::bigint, principal_nid, $2::text, $3::text,
        '{}', $5::text[]
    FROM (SELECT * FROM known_principal UNION ALL SELECT * FROM new_principal) AS p
    ON CONFLICT (principal_nid, device_id, conn_id) DO UPDATE
        SET connection_nid = EXCLUDED.connection_nid, base = 1, last_number = 1,
            used_ts = EXCLUDED.used_ts, unconfirmed = '{}',
            required_states = EXCLUDED.required_states
        WHERE c.connection_nid = ANY($6::bigint[])
    RETURNING connection_nid
),
too_many AS (
    DELETE FROM sliding_connections
    WHERE connection_nid = ANY($7::bigint[])
),
gone AS (
    DELETE FROM sliding_rooms
    WHERE connection_nid = ANY($6::bigint[] || $7::bigint[])
),
sent AS (
    INSERT INTO sliding_rooms (connection_nid, number, room_nid, sent_upto, receipts_upto,
        account_data_upto, timeline_limit, required_state, is_direct)
    SELECT o.connection_nid, 1, r.*
    FROM opened o
    CROSS JOIN unnest($8::int[], $9::bigint[], $10::bigint[], $11::bigint[], $12::int[],
        $13::int[], $14::boolean[]) AS r
)
SELECT connection_nid
FROM opened
