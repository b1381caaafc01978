-- Sent by storage.queries.outbox.outbox. Parameters: $1 bigint, $2 bigint, $3 text, $4 bigint, $5
-- text.

WITH
reached AS (
    SELECT COALESCE(min(stream_id), 0) AS position, max(stream_id) AS furthest
    FROM stream_positions
    WHERE stream_name = 'events'
),
-- so few positions that they have at most so many events
bounds AS MATERIALIZED (
    SELECT LEAST(r.position, (SELECT min(stream_ordering) FROM events
        WHERE stream_ordering > $1::bigint) + $4::bigint - 1) AS upto
    FROM reached r
),
-- a writer without a session, or this one, is behind the others. Its position must be moved before
-- a snapshot: one that committed after this snapshot, and ended, is not visible here
held AS (
    SELECT EXISTS (
        SELECT
        FROM reached r
        JOIN stream_positions p ON p.stream_name = 'events' AND p.stream_id < r.furthest
        WHERE p.instance_name = $5::text OR NOT EXISTS (
            SELECT FROM pg_stat_activity a
                WHERE a.datname = current_database()
                    AND is_session_of(a.application_name, p.instance_name)
        )
    ) AS is_held
),
event AS MATERIALIZED (
    SELECT e.stream_ordering, e.event_id, e.room_nid, e.audience, e.membership, e.state_key_nid,
        CASE WHEN e.membership = 4 /* INVITE */ THEN e.json END AS invite
    FROM events e
    JOIN principals p ON p.principal_nid = e.sender_nid
    WHERE e.stream_ordering > $1::bigint AND e.stream_ordering <= (SELECT upto FROM bounds)
        AND NOT e.backfilled AND NOT e.soft_failed AND e.rejected IS NULL
        AND substr(p.name, strpos(p.name, ':') + 1) = $3::text
    ORDER BY e.stream_ordering
    LIMIT $2::bigint
),
remote AS MATERIALIZED (  -- once a room
    SELECT v.room_nid, v.principal_nid, v.first_audience, p.name,
        v.audiences - COALESCE(v.invited_audiences, '{}') AS joined_audiences
    FROM (SELECT DISTINCT room_nid FROM event) AS r
    JOIN visibility v USING (room_nid)
    JOIN principals p USING (principal_nid)
    -- no local user: theirs is the topological ordering of a join, and a name with @
    WHERE v.last_join_topological IS NULL AND NOT starts_with(p.name, '@')
        -- not everybody, not the shared audiences
        AND v.principal_nid > 2 /* PRINCIPAL_SHARED */
        AND p.name <> $3::text
),
joined AS MATERIALIZED (  -- once an audience
    SELECT a.room_nid, a.audience, array_agg(s.name ORDER BY s.name) AS servers
    FROM (SELECT DISTINCT room_nid, audience FROM event) AS a
    JOIN remote s USING (room_nid)
    WHERE s.joined_audiences @> a.audience
        OR (a.audience < s.first_audience
            AND joined_before(a.room_nid, s.principal_nid, a.audience))
    GROUP BY a.room_nid, a.audience
)
SELECT CASE
        WHEN (SELECT count(*) FROM event) < $2::bigint THEN bounds.upto
        ELSE (SELECT max(stream_ordering) FROM event)
    END AS upto,
    e.stream_ordering AS position, e.event_id, r.room_id, e.audience,
    -- once an audience: there may be thousands
    CASE WHEN e.is_first THEN COALESCE(j.servers, '{}') || COALESCE(CASE WHEN r.is_partial THEN (
        SELECT array_remove(p.servers, $3::text)
        FROM partial_rooms p
        WHERE p.room_nid = r.room_nid
    ) END, '{}') END AS servers,
    CASE WHEN e.membership IS NOT NULL THEN k.state_key END AS target,
    r.room_version, e.invite, held.is_held
FROM bounds
CROSS JOIN held
LEFT JOIN (
    SELECT *, row_number() OVER (PARTITION BY room_nid, audience
        ORDER BY stream_ordering) = 1 AS is_first
    FROM event
) AS e ON true
LEFT JOIN rooms r USING (room_nid)
LEFT JOIN joined j ON j.room_nid = e.room_nid AND j.audience = e.audience
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
ORDER BY e.stream_ordering
