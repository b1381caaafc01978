-- Sent by storage.rebuild.swap.swap. Parameters: $1 int.

DELETE FROM auth_chains a
USING pg_temp.events s
WHERE a.event_nid = s.event_nid AND s.room_nid = $1::int
    AND NOT EXISTS (
        SELECT
        FROM pg_temp.auth_chains c
        WHERE c.event_nid = a.event_nid AND (c.event_nid, c.chain_nid, c.sequence_number, c.event_id, c.state_key, c.link_1, c.link_2) IS NOT DISTINCT FROM (a.event_nid, a.chain_nid, a.sequence_number, a.event_id, a.state_key, a.link_1, a.link_2)
    )
