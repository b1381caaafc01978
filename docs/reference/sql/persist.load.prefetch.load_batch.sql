-- Sent by storage.persist.load.prefetch.load_batch. Parameters: $1 to $8 request (rooms, events,
-- parents, auth, contents, groups, positions, deciding_keys), $9 to $16 names (principals, types,
-- key_types, state_keys, visible_rooms, visible_names, sequences, blocks).

WITH
room AS MATERIALIZED (
    SELECT * FROM rooms WHERE room_id = ANY($1::text[])
),
stored AS MATERIALIZED (
    SELECT event_nid, event_id, room_nid, stream_ordering, topological_ordering, claimed_depth(depth, topological_ordering) AS depth, origin_server_ts, state_group_before, state_group_after, audience, redacted_by, sender_nid, type_nid, state_key_nid, membership, outlier, backfilled, soft_failed, redacted_form, rejected, prev_nids(event_nid, prev_events, prev_distance) AS prev_events, auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4) AS auth_events, ineffective, refused, superseded
    FROM events
    WHERE event_nid = ANY(ARRAY(
        SELECT e.event_nid  -- one by one: for many ids a scan looks cheaper while a table is small
        FROM unnest($2::text[]) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS e
        UNION
        SELECT unnest(forward_extremities)
        FROM room
    ))
),
auth AS MATERIALIZED (
    SELECT event_nid FROM stored WHERE event_id = ANY($4::text[])
),
path AS MATERIALIZED (
    SELECT step.part AS state_group
    FROM unnest(ARRAY(
        SELECT COALESCE(state_group_after, state_group_before)
        FROM stored
        WHERE NOT outlier AND (
            event_id = ANY($3::text[])
            OR event_nid = ANY(ARRAY(SELECT unnest(forward_extremities) FROM room))
        )
        UNION
        SELECT current_state_group FROM room
    ) || $6::bigint[]) AS wanted (state_group)
    CROSS JOIN LATERAL state_path(wanted.state_group) AS step
),
chain_position AS MATERIALIZED (
    SELECT event_nid, COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number
    FROM auth_chains
    WHERE event_nid = ANY(ARRAY(SELECT event_nid FROM auth) || $7::bigint[])
),
chain AS MATERIALIZED (SELECT DISTINCT chain_nid FROM chain_position)
SELECT NULL::text AS kind, NULL::text[] AS texts, NULL::bigint[] AS numbers,
    NULL::bigint[] AS longs_1, NULL::bigint[] AS longs_2,
    NULL::int[] AS ints_1, NULL::int[] AS ints_2, NULL::int[] AS ints_3, NULL::bytea AS data
WHERE false
UNION ALL
SELECT 'room', ARRAY[room_id, room_version, out_of_range::text], ARRAY[room_nid, write_version, next_audience, current_state_group, max_topological_ordering, current_audience, removals, is_partial::int, in_order_ts], forward_extremities, NULL, NULL, NULL, NULL, NULL
FROM room
UNION ALL
SELECT 'event', ARRAY[event_id, rejected, refused], ARRAY[event_nid, room_nid, stream_ordering, topological_ordering, depth, origin_server_ts, state_group_before, state_group_after, audience, redacted_by, sender_nid, type_nid, state_key_nid, membership, outlier::int, backfilled::int, soft_failed::int, redacted_form::int, ineffective::int, superseded::int], prev_events, auth_events, NULL, NULL, NULL, NULL
FROM stored
UNION ALL
SELECT 'missing', ARRAY[event_id], ARRAY[event_nid, room_nid, superseded::int], child_nids, NULL, NULL, NULL, NULL, NULL
FROM missing_events
WHERE event_id = ANY($2::text[])
UNION ALL
SELECT 'waiting', ARRAY[target_event_id], ARRAY[redaction_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM waiting_redactions
WHERE target_event_id = ANY($2::text[])
UNION ALL
SELECT 'content', ARRAY[e.event_id, r.room_id, r.room_version],
    ARRAY[e.event_nid, e.redacted_form::int], NULL, NULL, NULL, NULL, NULL, e.json
FROM events e
CROSS JOIN LATERAL (
    SELECT room_id, room_version FROM rooms WHERE room_nid = e.room_nid OFFSET 0
) AS r
WHERE e.event_nid = ANY(ARRAY(
    SELECT event_nid FROM auth
    UNION
    SELECT c.event_nid
    FROM room
    CROSS JOIN unnest($8::int[]) AS deciding (state_key_nid)
    CROSS JOIN LATERAL (
        SELECT event_nid
        FROM current_state
        WHERE room_nid = room.room_nid AND state_key_nid = deciding.state_key_nid
        OFFSET 0
    ) AS c
) || $5::bigint[])
UNION ALL
SELECT 'group', NULL, ARRAY[state_group, digest, audience, room_nid, entry_count, runs, key_nid, member_key_nid, event_nid], event_nids, member_event_nids, back, key_nids, member_key_nids, path
FROM state_groups
WHERE state_group = ANY(ARRAY(SELECT DISTINCT state_group FROM path))
UNION ALL
SELECT 'position', NULL, ARRAY[event_nid, chain_nid, sequence_number], NULL, NULL, NULL, NULL, NULL, NULL
FROM chain_position
UNION ALL
SELECT 'chain', NULL, ARRAY[c.chain_nid, NULL, max(a.sequence_number)], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM chain c
CROSS JOIN LATERAL chain_rows(c.chain_nid, 2147483647) AS a
GROUP BY c.chain_nid
UNION ALL
SELECT 'chain', NULL, ARRAY[c.chain_nid, l.chain_nid_reached, l.upto], NULL, NULL, NULL, NULL, NULL,
    NULL
FROM chain c
CROSS JOIN LATERAL reached_from(c.chain_nid, 2147483647) AS l
UNION ALL
SELECT 'principal', ARRAY[name], ARRAY[principal_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM principals
WHERE name = ANY($9::text[])
UNION ALL
SELECT 'type', ARRAY[type], ARRAY[type_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM event_types
WHERE type = ANY($10::text[])
UNION ALL
SELECT 'state_key', ARRAY[k.state_key], ARRAY[k.type_nid, k.state_key_nid], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest($11::text[], $12::text[]) AS wanted (type, state_key)
CROSS JOIN LATERAL (SELECT type_nid FROM event_types WHERE type = wanted.type OFFSET 0) AS t
-- one by one, by the whole key, as the next: never all keys of a type, nor all members of a room,
-- for each
CROSS JOIN LATERAL (
    SELECT * FROM state_keys WHERE type_nid = t.type_nid AND state_key = wanted.state_key OFFSET 0
) AS k
UNION ALL
SELECT 'visible', ARRAY[v.audiences::text, v.invited_audiences::text], ARRAY[v.room_nid, v.principal_nid, v.last_join_topological, v.joined_count, v.invited_count, v.first_audience], NULL, NULL, NULL, NULL, NULL, NULL
FROM unnest($13::text[], $14::text[]) AS wanted (room_id, name)
CROSS JOIN LATERAL (SELECT room_nid FROM rooms WHERE room_id = wanted.room_id OFFSET 0) AS r
CROSS JOIN LATERAL (SELECT principal_nid FROM principals WHERE name = wanted.name OFFSET 0) AS p
CROSS JOIN LATERAL (
    SELECT *
    FROM visibility
    WHERE room_nid = r.room_nid AND principal_nid = p.principal_nid
    OFFSET 0
) AS v
UNION ALL
SELECT 'number', ARRAY[wanted.name], ARRAY[nextval(wanted.name::regclass)], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest($15::text[], $16::int[]) AS wanted (name, blocks)
CROSS JOIN generate_series(1, wanted.blocks)
