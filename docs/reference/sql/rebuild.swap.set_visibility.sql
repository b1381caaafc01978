-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

INSERT INTO visibility AS o (room_nid, last_join_topological, principal_nid, joined_count, invited_count, audiences, invited_audiences, first_audience)
SELECT $1::int, last_join_topological, principal_nid, joined_count, invited_count, audiences, invited_audiences, first_audience
FROM pg_temp.visibility
WHERE room_nid = $2::int
ON CONFLICT (room_nid, principal_nid) DO UPDATE SET last_join_topological = EXCLUDED.last_join_topological, joined_count = EXCLUDED.joined_count, invited_count = EXCLUDED.invited_count, audiences = EXCLUDED.audiences, invited_audiences = EXCLUDED.invited_audiences, first_audience = EXCLUDED.first_audience
    WHERE (o.last_join_topological, o.joined_count, o.invited_count, o.audiences, o.invited_audiences, o.first_audience) IS DISTINCT FROM (EXCLUDED.last_join_topological, EXCLUDED.joined_count, EXCLUDED.invited_count, EXCLUDED.audiences, EXCLUDED.invited_audiences, EXCLUDED.first_audience)
