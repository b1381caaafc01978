-- Sent by storage.streams.receipts.Receipts. Parameters: $1 text, $2 text, $3 text, $4 text, $5
-- text, $6 bytea, $7 smallint, $8 text, $9 int.

WITH
target AS MATERIALIZED (
    SELECT e.room_nid, e.backfilled, e.topological_ordering, e.stream_ordering,
        CASE WHEN e.backfilled THEN COALESCE((
            SELECT o.stream_ordering
            FROM (
                SELECT l.topological_ordering, l.stream_ordering, l.backfilled
                FROM events l
                WHERE l.room_nid = e.room_nid AND NOT l.outlier
                    AND (l.topological_ordering, l.stream_ordering)
                        < (e.topological_ordering, e.stream_ordering)
                ORDER BY l.topological_ordering DESC, l.stream_ordering DESC
                LIMIT 10000
            ) AS o
            WHERE NOT o.backfilled
            ORDER BY o.topological_ordering DESC, o.stream_ordering DESC
            LIMIT 1
        ), 0) ELSE e.stream_ordering END AS read_upto
    -- by its id: with a condition on its room, Postgres could read all events of the room
    FROM (SELECT * FROM events WHERE event_id = $5::text OFFSET 0) AS e
    CROSS JOIN LATERAL (SELECT room_id FROM rooms WHERE room_nid = e.room_nid OFFSET 0) AS r
    WHERE r.room_id = $1::text AND NOT e.outlier
),
known_principal AS (
    SELECT principal_nid FROM principals WHERE name = $3::text
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), $3::text
    WHERE NOT EXISTS (SELECT FROM known_principal) AND EXISTS (SELECT FROM target)
    RETURNING principal_nid
),
fact AS (
    INSERT INTO receipts AS c (stream_id, room_nid, principal_nid, writer_nid, receipt_type,
        thread_id, event_id, data)
    SELECT nextval('receipts_stream'), t.room_nid, p.principal_nid, $7::smallint, $2::text,
        $4::text, $5::text, $6::bytea
    FROM (SELECT * FROM known_principal UNION ALL SELECT * FROM new_principal) AS p
    CROSS JOIN target t
    ON CONFLICT (room_nid, principal_nid, receipt_type, thread_id) DO UPDATE
        SET stream_id = EXCLUDED.stream_id, writer_nid = EXCLUDED.writer_nid,
            event_id = EXCLUDED.event_id, data = EXCLUDED.data
        WHERE NOT EXISTS (  -- the present one is further
            SELECT
            FROM (SELECT * FROM events WHERE event_id = c.event_id OFFSET 0) AS e
            CROSS JOIN target t
            WHERE e.room_nid = t.room_nid AND NOT e.outlier
                AND (CASE WHEN e.backfilled THEN COALESCE((
                    SELECT o.stream_ordering
                    FROM (
                        SELECT l.topological_ordering, l.stream_ordering, l.backfilled
                        FROM events l
                        WHERE l.room_nid = e.room_nid AND NOT l.outlier
                            AND (l.topological_ordering, l.stream_ordering)
                                < (e.topological_ordering, e.stream_ordering)
                        ORDER BY l.topological_ordering DESC, l.stream_ordering DESC
                        LIMIT 10000
                    ) AS o
                    WHERE NOT o.backfilled
                    ORDER BY o.topological_ordering DESC, o.stream_ordering DESC
                    LIMIT 1
                ), 0) ELSE e.stream_ordering END, e.backfilled, e.topological_ordering, e.stream_ordering)
                    > (t.read_upto, t.backfilled, t.topological_ordering, t.stream_ordering)
        )
    RETURNING stream_id
),
position AS (
    UPDATE stream_positions
    SET stream_id = GREATEST(stream_positions.stream_id, fact.stream_id)
    FROM fact
    WHERE stream_name = 'receipts' AND instance_name = $8::text AND epoch = $9::int
    RETURNING stream_positions.stream_id
)
SELECT stream_id, CASE
        WHEN EXISTS (SELECT FROM position) THEN (SELECT count(*)::int FROM stream_positions
            WHERE stream_name = 'receipts')
        ELSE refuse_old_writer($8::text)::int
    END AS writers
FROM fact
