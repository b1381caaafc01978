-- Sent by storage.queries.explain_visibility._facts. Parameters: $1 int, $2 text.

SELECT EXISTS (
    SELECT
    FROM memberships m
    JOIN principals p USING (principal_nid)
    WHERE m.room_nid = $1::int AND p.name = $2::text AND m.forgotten AND m.membership < 3 /* KNOCK */
)
