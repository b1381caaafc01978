-- Sent by storage.maintenance.verify.current.check_member_counts. Parameters: $1 int.

SELECT r.joined_count, r.invited_count,
    (SELECT count(*)::int FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = 5 /* JOIN */) AS joined,
    (SELECT count(*)::int FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = 4 /* INVITE */) AS invited
FROM rooms r
WHERE r.room_nid = $1::int
