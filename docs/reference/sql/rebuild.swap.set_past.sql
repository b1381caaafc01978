-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

INSERT INTO past_visibility AS o (room_nid, first_audience, opened_topological, principal_nid, audiences, invited_audiences, topological_ranges)
SELECT $1::int, first_audience, opened_topological, principal_nid, audiences, invited_audiences, topological_ranges
FROM pg_temp.past_visibility
WHERE room_nid = $2::int
ON CONFLICT (room_nid, principal_nid, first_audience) DO UPDATE SET opened_topological = EXCLUDED.opened_topological, audiences = EXCLUDED.audiences, invited_audiences = EXCLUDED.invited_audiences, topological_ranges = EXCLUDED.topological_ranges
    WHERE (o.opened_topological, o.audiences, o.invited_audiences, o.topological_ranges) IS DISTINCT FROM (EXCLUDED.opened_topological, EXCLUDED.audiences, EXCLUDED.invited_audiences, EXCLUDED.topological_ranges)
