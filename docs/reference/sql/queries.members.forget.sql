-- Sent by storage.queries.members.forget. Parameters: $1 text, $2 text.

WITH
own AS MATERIALIZED (
    SELECT r.room_nid, p.principal_nid
    FROM rooms r
    LEFT JOIN principals p ON p.name = $2::text
    WHERE r.room_id = $1::text
),
gone AS (
    UPDATE memberships m
    SET forgotten = true
    FROM own
    WHERE m.principal_nid = own.principal_nid AND m.room_nid = own.room_nid
        AND m.membership < 3 /* KNOCK */
    RETURNING m.membership
)
SELECT COALESCE(m.membership, 0) AS membership, EXISTS (SELECT FROM gone) AS is_forgotten
FROM own
LEFT JOIN memberships m ON m.principal_nid = own.principal_nid AND m.room_nid = own.room_nid
