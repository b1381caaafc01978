-- Sent by storage.rebuild.client_positions.repair_memberships. Parameters: $1 int, $2 text.

WITH
wanted AS (  -- local users in the current state, with the position of the last known change
    SELECT p.principal_nid, c.event_nid, COALESCE(c.membership, 0) AS membership,
        COALESCE(d.stream_ordering, e.stream_ordering, r.last_stream_ordering,
            1) AS stream_ordering,
        COALESCE(d.writer_nid, e.writer_nid) AS writer_nid
    FROM current_state c
    JOIN rooms r USING (room_nid)
    JOIN state_keys k USING (state_key_nid)
    JOIN principals p ON p.name = k.state_key
    JOIN events e ON e.event_nid = c.event_nid
    LEFT JOIN LATERAL (
        SELECT stream_ordering, writer_nid
        FROM state_deltas
        WHERE room_nid = c.room_nid AND state_key_nid = c.state_key_nid
        ORDER BY stream_ordering DESC
        LIMIT 1
    ) AS d ON true
    WHERE c.room_nid = $1::int AND k.type_nid = 2 /* TYPE_MEMBER */
        AND right(k.state_key, length($2::text) + 1) = ':' || $2::text
),
own AS (  -- rows that may stay: out of band, while no local user is joined
    SELECT m.principal_nid
    FROM memberships m
    JOIN principals p USING (principal_nid)
    JOIN events e ON e.event_nid = m.event_nid AND e.membership = m.membership
        -- an accepted event of the history is not in the current state
        AND (e.outlier OR (e.backfilled AND e.rejected IS NULL AND NOT e.soft_failed))
    JOIN state_keys k ON k.state_key_nid = e.state_key_nid AND k.state_key = p.name
    WHERE m.room_nid = $1::int AND m.membership <> 5 /* JOIN */
        AND NOT EXISTS (SELECT FROM wanted w WHERE w.membership = 5 /* JOIN */)
),
gone AS (
    DELETE FROM memberships m
    WHERE m.room_nid = $1::int
        AND NOT (m.event_nid = 0 AND m.membership = 0)
        AND NOT EXISTS (SELECT FROM wanted w WHERE w.principal_nid = m.principal_nid)
        AND NOT EXISTS (SELECT FROM own o WHERE o.principal_nid = m.principal_nid)
)
INSERT INTO memberships (principal_nid, room_nid, membership, event_nid, stream_ordering,
    writer_nid)
SELECT principal_nid, $1::int, membership, event_nid, stream_ordering, writer_nid
FROM wanted w
WHERE NOT EXISTS (SELECT FROM own o WHERE o.principal_nid = w.principal_nid)
ON CONFLICT (principal_nid, room_nid) DO UPDATE
    SET membership = EXCLUDED.membership, event_nid = EXCLUDED.event_nid
    WHERE (memberships.membership, memberships.event_nid) <> (EXCLUDED.membership,
        EXCLUDED.event_nid)
