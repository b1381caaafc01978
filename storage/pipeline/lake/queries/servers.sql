-- Servers by the lag of their events, and how often they fork a room.
SELECT day, server, events, median_lag_ms, p95_lag_ms, forks, merges, refused
FROM {daily_servers}
ORDER BY day DESC, median_lag_ms DESC, server
