-- Sent by storage.queries.state_at.reduced_state. Parameters: $1 text.

WITH
joined AS MATERIALIZED (
    SELECT e.room_nid, e.stream_ordering, e.state_group_before,
        auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) AS auth_nids, k.state_key AS user_id
    FROM events e
    JOIN state_keys k USING (state_key_nid)
    WHERE e.event_id = $1::text
),
entry AS MATERIALIZED (
    SELECT s.state_key_nid, e.event_nid, e.event_id
    FROM joined
    CROSS JOIN LATERAL state_but_members(joined.state_group_before) AS s
    LEFT JOIN events e USING (event_nid)
)
SELECT COALESCE(j.state_group_before, 0) AS state_group,
    ARRAY(SELECT event_id FROM entry) AS event_ids,
    EXISTS (SELECT FROM entry WHERE event_nid IS NULL) AS is_lost,
    ARRAY(
        SELECT k.state_key
        FROM events e
        JOIN state_keys k USING (state_key_nid)
        WHERE e.event_nid = ANY(j.auth_nids) AND k.type_nid = 2 /* TYPE_MEMBER */
    ) AS cited,
    CASE WHEN EXISTS (
            SELECT FROM entry WHERE state_key_nid IN (9 /* KEY_NAME */, 11 /* KEY_CANONICAL_ALIAS */)
        ) THEN '{}'
        ELSE heroes_of(j.room_nid, j.stream_ordering - 1, ARRAY[4 /* INVITE */, 5 /* JOIN */]::smallint[],
            j.user_id) END AS heroes
FROM joined j
