-- Sent by storage.queries.sliding.connection._write_on. Parameters: $1 connection_nid bigint, $2
-- base bigint, $3 last_number bigint, $4 unconfirmed bigint[], $5 now_ms bigint, $6 required_states
-- text[], $7 dropped bigint[], $8 room_nids int[], $9 sent_upto bigint[], $10 receipts_upto
-- bigint[], $11 account_data_upto bigint[], $12 timeline_limits int[], $13 required_indexes int[],
-- $14 is_direct boolean[].

WITH
connection AS (  -- the other parts depend on its row
    UPDATE sliding_connections
    SET base = $2::bigint, last_number = last_number + 1, unconfirmed = $4::bigint[],
        used_ts = $5::bigint, required_states = COALESCE($6::text[], required_states)
    WHERE connection_nid = $1::bigint AND last_number = $3::bigint
    RETURNING last_number
),
room AS MATERIALIZED (
    SELECT *
    FROM unnest($8::int[], $9::bigint[], $10::bigint[], $11::bigint[], $12::int[],
            $13::int[], $14::boolean[])
        AS r (room_nid, sent_upto, receipts_upto, account_data_upto, timeline_limit, required_state,
            is_direct)
),
dropped AS (  -- states that nobody has: rare, so it may read all rows of the connection
    DELETE FROM sliding_rooms
    WHERE connection_nid = $1::bigint AND number = ANY($7::bigint[])
        AND cardinality($7::bigint[]) > 0 AND EXISTS (SELECT FROM connection)
),
superseded AS (
    DELETE FROM sliding_rooms s
    USING room
    WHERE s.connection_nid = $1::bigint AND s.room_nid = room.room_nid
        AND s.number <> ALL($7::bigint[]) AND s.number < (
        SELECT max(l.number)
        FROM sliding_rooms l
        WHERE l.connection_nid = $1::bigint AND l.room_nid = room.room_nid
            AND l.number <= $2::bigint AND l.number <> ALL($7::bigint[])
    ) AND EXISTS (SELECT FROM connection)
),
sent AS (
    INSERT INTO sliding_rooms (connection_nid, number, room_nid, sent_upto, receipts_upto,
        account_data_upto, timeline_limit, required_state, is_direct)
    SELECT $1::bigint, connection.last_number, room.*
    FROM connection
    CROSS JOIN room
)
SELECT last_number
FROM connection
