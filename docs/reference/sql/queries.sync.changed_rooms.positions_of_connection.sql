-- Sent by storage.queries.sliding.response.confirmed. Parameters: $1 bigint, $2 bigint, $3 text, $4
-- text, $5 text.

SELECT 'writer' AS kind, stream_name, instance_name, stream_id AS position
FROM stream_positions
WHERE stream_name <> 'backfill'
UNION ALL
SELECT 'purged', stream_name, NULL, purged_upto
FROM purged_streams
WHERE stream_name = 'events'
UNION ALL
SELECT 'connection', 'events', NULL, c.used_ts
FROM sliding_connections c
JOIN principals u USING (principal_nid)
WHERE c.connection_nid = $1::bigint AND ($2::bigint = c.base OR $2::bigint = ANY(c.unconfirmed))
    AND u.name = $3::text AND c.device_id = $4::text AND c.conn_id = $5::text
