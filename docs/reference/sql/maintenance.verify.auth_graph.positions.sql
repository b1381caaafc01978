-- Sent by storage.maintenance.verify.auth_graph.read_cover. Parameters: $1 int.

SELECT a.event_nid, COALESCE(a.chain_nid, -a.event_nid) AS chain_nid, a.sequence_number, a.link_1,
    a.link_2
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
CROSS JOIN LATERAL (SELECT * FROM auth_chains WHERE event_nid = e.event_nid OFFSET 0) AS a
