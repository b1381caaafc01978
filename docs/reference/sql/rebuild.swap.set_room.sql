-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

UPDATE rooms r
SET current_state_group = COALESCE(same.live, s.current_state_group),
    last_stream_ordering = GREATEST(r.completed_at, (
        SELECT max(e.stream_ordering)
        FROM events e
        WHERE e.room_nid = $1::int AND NOT e.outlier AND NOT e.backfilled
    )),
    max_topological_ordering = GREATEST(r.max_topological_ordering, s.max_topological_ordering),
    next_audience = s.next_audience, current_audience = s.current_audience, joined_count = s.joined_count, invited_count = s.invited_count, room_version = s.room_version, forward_extremities = s.forward_extremities, out_of_range = s.out_of_range
FROM pg_temp.rooms s
LEFT JOIN pg_temp.same_groups same ON same.shadow = s.current_state_group
WHERE r.room_nid = $1::int AND s.room_nid = $2::int
