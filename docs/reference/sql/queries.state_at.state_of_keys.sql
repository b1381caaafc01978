-- Sent by storage.queries.state_at.states_at. Parameters: $1 text[], $2 boolean, $3 text[], $4
-- text[].

WITH
at AS MATERIALIZED (  -- the requested groups
    SELECT event_id,
        CASE WHEN $2::boolean THEN COALESCE(state_group_after, state_group_before)
            ELSE state_group_before END AS state_group
    FROM events
    WHERE event_nid = ANY(ARRAY(
        SELECT found.event_nid
        FROM unnest($1::text[]) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
    ))
),
wanted AS MATERIALIZED (
    SELECT k.state_key_nid, k.type_nid = 2 /* TYPE_MEMBER */ AS member
    FROM unnest($3::text[], $4::text[]) AS w (type, state_key)
    JOIN event_types t USING (type)
    CROSS JOIN LATERAL (  -- one by one: a join could read the keys of all members
        SELECT state_key_nid, type_nid FROM state_keys
        WHERE type_nid = t.type_nid AND state_key = w.state_key OFFSET 0
    ) AS k
),
-- the rows of their paths, by position; without a part where the group is lost
step AS MATERIALIZED (
    SELECT one.state_group, p.part, p.place
    FROM (SELECT DISTINCT state_group FROM at) AS one
    LEFT JOIN LATERAL state_path(one.state_group) AS p ON true
),
stored AS MATERIALIZED (  -- each of these rows once
    SELECT g.state_group AS part, g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid
    FROM (SELECT DISTINCT part FROM step) AS parts
    JOIN state_groups g ON g.state_group = parts.part
),
entry AS MATERIALIZED (  -- their entries for the keys
    SELECT g.part, w.state_key_nid,
        own_entry(w.state_key_nid, w.member, g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS event_nid
    FROM stored g
    CROSS JOIN wanted w
),
folded AS (  -- the last row of the path wins
    SELECT DISTINCT ON (s.state_group, e.state_key_nid) s.state_group, e.state_key_nid, e.event_nid
    FROM step s
    JOIN entry e USING (part)
    WHERE e.event_nid IS NOT NULL
    ORDER BY s.state_group, e.state_key_nid, s.place DESC
),
named AS (
    SELECT f.state_group, t.type, k.state_key, e.event_id
    FROM folded f
    CROSS JOIN LATERAL (
        SELECT type_nid, state_key FROM state_keys WHERE state_key_nid = f.state_key_nid OFFSET 0
    ) AS k
    JOIN event_types t USING (type_nid)
    LEFT JOIN events e USING (event_nid)
    WHERE f.event_nid <> 0
)
SELECT at.event_id AS at_event_id, at.state_group,
    at.state_group IN (SELECT s.state_group FROM step s LEFT JOIN stored g USING (part)
        WHERE g.part IS NULL) AS is_lost,
    n.type, n.state_key, n.event_id
FROM at
LEFT JOIN named n USING (state_group)
