-- Minutes, in UTC, in which many users joined a room.
SELECT timestamp_ntz'1970-01-01' + make_dt_interval(0, 0, CAST(minute AS INT)) AS minute, room_id, joins, servers
FROM {daily_joins}
WHERE joins > 1
ORDER BY joins DESC, minute DESC, room_id
