-- Sent by storage.maintenance.repair.graph.rebuild_cover. Parameters: $1 int.

WITH gone AS (
    DELETE FROM auth_chains a
    WHERE a.event_nid = ANY(ARRAY(SELECT e.event_nid FROM (
        SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
        UNION ALL
        SELECT * FROM events WHERE room_nid = $1::int AND outlier
        OFFSET 0
    ) AS e))
    RETURNING COALESCE(a.chain_nid, -a.event_nid) AS chain_nid
)
DELETE FROM auth_chain_links
WHERE chain_nid = ANY(ARRAY(SELECT chain_nid FROM gone))
