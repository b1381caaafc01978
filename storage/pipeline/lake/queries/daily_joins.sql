-- Per day, room and minute: users who sent a join. Changes of a profile are joins as well.
SELECT
    day,
    room_id,
    received_ts DIV 60000 AS minute,
    count(DISTINCT state_key) AS joins,
    count(DISTINCT substr(state_key, instr(state_key, ':') + 1)) AS servers
FROM {events}
WHERE type = 'm.room.member'
    AND origin = 'live'
    AND rejected IS NULL
    AND NOT soft_failed
    AND get_json_object(CAST(pdu AS STRING), '$.content.membership') = 'join'
GROUP BY day, room_id, minute
