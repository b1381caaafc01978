-- Sent by storage.queries.state_at.states_at. Parameters: $1 text[], $2 boolean, $3 text[].

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
kind AS MATERIALIZED (  -- once: the types would else be read for each entry
    SELECT type_nid, type FROM event_types WHERE type = ANY($3::text[])
),
-- the rows of their paths without members; a lost row has no part
step AS MATERIALIZED (
    SELECT one.state_group, p.place, g.state_group AS part, g.key_nids, g.event_nids, g.key_nid, g.event_nid
    FROM (SELECT DISTINCT state_group FROM at) AS one
    LEFT JOIN LATERAL state_path(one.state_group) AS p ON true
    LEFT JOIN state_groups g ON g.state_group = p.part
),
entry AS (  -- their entries
    SELECT s.state_group, s.place, e.state_key_nid, e.event_nid
    FROM step s
    CROSS JOIN LATERAL own_others(s.key_nids, s.event_nids, s.key_nid, s.event_nid) AS e
),
folded AS (  -- the last row of the path wins
    SELECT DISTINCT ON (state_group, state_key_nid) state_group, state_key_nid, event_nid
    FROM entry
    ORDER BY state_group, state_key_nid, place DESC
),
named AS (
    SELECT f.state_group, t.type, k.state_key, e.event_id
    FROM folded f
    CROSS JOIN LATERAL (  -- one by one: a state has few keys that are no members
        SELECT type_nid, state_key FROM state_keys WHERE state_key_nid = f.state_key_nid OFFSET 0
    ) AS k
    JOIN kind t USING (type_nid)
    LEFT JOIN events e USING (event_nid)
    WHERE f.event_nid <> 0
)
SELECT at.event_id AS at_event_id, at.state_group,
    at.state_group IN (SELECT state_group FROM step WHERE part IS NULL) AS is_lost,
    n.type, n.state_key, n.event_id
FROM at
LEFT JOIN named n USING (state_group)
