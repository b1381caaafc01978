-- Sent by storage.rebuild.swap.swap. Parameters: $1 int.

INSERT INTO auth_chain_links AS o (chain_nid, target_chain_nid, sequence_number, target_sequence_number)
SELECT l.chain_nid, l.target_chain_nid, l.sequence_number, l.target_sequence_number
FROM (
    SELECT DISTINCT COALESCE(c.chain_nid, -c.event_nid) AS chain_nid
    FROM pg_temp.auth_chains c
    JOIN pg_temp.events s ON s.event_nid = c.event_nid
    WHERE s.room_nid = $1::int
) AS own
JOIN pg_temp.auth_chain_links l ON l.chain_nid = own.chain_nid
ON CONFLICT (chain_nid, sequence_number, target_chain_nid) DO UPDATE SET target_sequence_number = EXCLUDED.target_sequence_number
    WHERE (o.target_sequence_number) IS DISTINCT FROM (EXCLUDED.target_sequence_number)
