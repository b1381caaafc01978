-- Sent by storage.rebuild.swap.swap. Parameters: $1 int.

INSERT INTO auth_chains (event_nid, chain_nid, sequence_number, event_id, state_key, link_1, link_2)
SELECT c.event_nid, c.chain_nid, c.sequence_number, c.event_id, c.state_key, c.link_1, c.link_2
FROM pg_temp.auth_chains c
JOIN pg_temp.events s ON s.event_nid = c.event_nid
WHERE s.room_nid = $1::int
ON CONFLICT (event_nid) DO NOTHING
