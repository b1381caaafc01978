-- Minutes in which many users joined a room.
SELECT timestamp_seconds(minute * 60) AS minute, room_id, joins, servers
FROM {daily_joins}
WHERE joins > 1
ORDER BY joins DESC, minute DESC, room_id
