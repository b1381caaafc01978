-- Sent by storage.queries.members.joined_servers_at. Parameters: $1 text, $2 text.

WITH at AS MATERIALIZED (
    SELECT r.room_nid, r.is_partial, e.event_nid, e.outlier, g.audience
    FROM rooms r
    LEFT JOIN events e ON e.room_nid + 0 = r.room_nid AND e.event_id = $2::text
    LEFT JOIN state_groups g ON g.state_group = e.state_group_before
    WHERE r.room_id = $1::text
)
SELECT at.event_nid IS NOT NULL AS is_stored, at.audience IS NOT NULL AS has_state, ARRAY(
    SELECT p.name
    FROM visibility v
    JOIN principals p USING (principal_nid)
    WHERE v.room_nid = at.room_nid AND v.last_join_topological IS NULL AND left(p.name, 1) <> '@'
        -- not everybody, not the shared audiences; + 0: the primary key leads over all members
        AND v.principal_nid + 0 > 2 /* PRINCIPAL_SHARED */
        AND CASE
            WHEN at.audience < v.first_audience
                THEN joined_before(v.room_nid, v.principal_nid, at.audience)
            ELSE v.audiences @> at.audience
                AND NOT COALESCE(v.invited_audiences @> at.audience, false)
        END
    UNION
    SELECT unnest(p.servers)
    FROM partial_rooms p
    WHERE at.is_partial AND p.room_nid = at.room_nid
) AS servers
FROM at
