-- Sent by storage.rebuild.swap._swap_groups. Parameters: $1 int, $2 int.

WITH RECURSIVE
used AS (
    SELECT state_group_before AS state_group FROM pg_temp.events
        WHERE room_nid = $2::int AND NOT outlier
    UNION
    SELECT state_group_after FROM pg_temp.events WHERE room_nid = $2::int AND NOT outlier
    UNION
    SELECT current_state_group FROM pg_temp.rooms WHERE room_nid = $2::int
),
lacking AS (
    SELECT u.state_group
    FROM used u
    WHERE NOT EXISTS (SELECT FROM pg_temp.same_groups same WHERE same.shadow = u.state_group)
    UNION
    SELECT s.state_group  -- the empty state of a room is always there
    FROM pg_temp.state_groups s
    WHERE s.room_nid = $2::int AND s.entry_count = 0
        AND NOT EXISTS (SELECT FROM state_groups g
            WHERE g.entry_count = 0 AND g.room_nid = $1::int)
),
needed AS (  -- with their paths, which state_path would read in the live table
    SELECT state_group
    FROM lacking
    UNION
    SELECT s.state_group - own.distance
    FROM needed
    JOIN pg_temp.state_groups s USING (state_group)
    CROSS JOIN LATERAL distances_in_path(s.back, s.path) AS own
)
INSERT INTO state_groups (room_nid, state_group, digest, audience, entry_count, runs, back, key_nids, event_nids, member_key_nids, member_event_nids, key_nid, member_key_nid, event_nid, path)
SELECT $1::int, s.state_group, s.digest, s.audience, s.entry_count, s.runs, s.back, s.key_nids, s.event_nids, s.member_key_nids, s.member_event_nids, s.key_nid, s.member_key_nid, s.event_nid, s.path
FROM needed
JOIN pg_temp.state_groups s USING (state_group)
