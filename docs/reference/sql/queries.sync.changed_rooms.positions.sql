-- Sent by storage.queries.sync.changed_rooms.writers. No parameters.

SELECT 'writer' AS kind, stream_name, instance_name, stream_id AS position
FROM stream_positions
WHERE stream_name <> 'backfill'
UNION ALL
SELECT 'purged', stream_name, NULL, purged_upto
FROM purged_streams
WHERE stream_name = 'events'
