-- Sent by storage.persist.load.prefetch.load_batch. Parameters: $1 to $8 names (principals, types,
-- key_types, state_keys, visible_rooms, visible_names, sequences, blocks).

SELECT NULL::text AS kind, NULL::text[] AS texts, NULL::bigint[] AS numbers,
    NULL::bigint[] AS longs_1, NULL::bigint[] AS longs_2,
    NULL::int[] AS ints_1, NULL::int[] AS ints_2, NULL::int[] AS ints_3, NULL::bytea AS data
WHERE false
UNION ALL
SELECT 'principal', ARRAY[name], ARRAY[principal_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM principals
WHERE name = ANY($1::text::text[])
UNION ALL
SELECT 'type', ARRAY[type], ARRAY[type_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM event_types
WHERE type = ANY($2::text::text[])
UNION ALL
SELECT 'state_key', ARRAY[k.state_key], ARRAY[k.type_nid, k.state_key_nid], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest($3::text::text[], $4::text::text[]) AS wanted (type, state_key)
CROSS JOIN LATERAL (SELECT type_nid FROM event_types WHERE type = wanted.type OFFSET 0) AS t
-- one by one, by the whole key, as the next: never all keys of a type, nor all members of a room,
-- for each
CROSS JOIN LATERAL (
    SELECT * FROM state_keys WHERE type_nid = t.type_nid AND state_key = wanted.state_key OFFSET 0
) AS k
UNION ALL
SELECT 'visible', ARRAY[v.audiences::text, v.invited_audiences::text], ARRAY[v.room_nid, v.principal_nid, v.last_join_topological, v.joined_count, v.invited_count, v.first_audience], NULL, NULL, NULL, NULL, NULL, NULL
FROM unnest($5::text::text[], $6::text::text[]) AS wanted (room_id, name)
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
FROM unnest($7::text::text[], $8::text::int[]) AS wanted (name, blocks)
CROSS JOIN generate_series(1, wanted.blocks)
