-- Messages and those who sent them, by day, room and server.
SELECT
    day,
    room_id,
    server,
    sum(messages) AS messages,
    count_if(messages > 0) AS senders,
    sum(events) AS events
FROM {daily_senders}
GROUP BY day, room_id, server
ORDER BY day DESC, messages DESC, room_id, server
