-- Sent by storage.rebuild.swap.swap. Parameters: $1 int, $2 int.

INSERT INTO missing_events AS m (room_nid, event_nid, superseded, event_id, child_nids)
SELECT $1::int, s.event_nid, s.superseded, s.event_id, s.child_nids
FROM pg_temp.missing_events s
WHERE s.room_nid = $2::int
ON CONFLICT (event_nid) DO UPDATE SET superseded = EXCLUDED.superseded, child_nids = EXCLUDED.child_nids, room_nid = EXCLUDED.room_nid
    WHERE (m.superseded, m.child_nids, m.room_nid)
        IS DISTINCT FROM (EXCLUDED.superseded, EXCLUDED.child_nids, EXCLUDED.room_nid)
