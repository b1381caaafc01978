-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

INSERT INTO audiences AS o (room_nid, audience, opened_topological, branches, continued)
SELECT $1::int, audience, opened_topological, branches, continued
FROM pg_temp.audiences
WHERE room_nid = $2::int
ON CONFLICT (room_nid, audience) DO UPDATE SET opened_topological = EXCLUDED.opened_topological, branches = EXCLUDED.branches, continued = EXCLUDED.continued
    WHERE (o.opened_topological, o.branches, o.continued) IS DISTINCT FROM (EXCLUDED.opened_topological, EXCLUDED.branches, EXCLUDED.continued)
