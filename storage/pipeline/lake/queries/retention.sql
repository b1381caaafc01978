-- Users who wrote in a week, and those of them who wrote in the next week as well: in all rooms, by
-- server and by room. The last week has no next one yet.
WITH active AS (
    SELECT DISTINCT trunc(day, 'WEEK') AS week, room_id, server, sender
    FROM {daily_senders}
    WHERE messages > 0
),
scoped AS (
    SELECT DISTINCT
        week,
        sender,
        stack(3, 'all', '', 'server', server, 'room', room_id) AS (scope, name)
    FROM active
)
SELECT a.week, a.scope, a.name, count(*) AS users, count(b.sender) AS users_next_week
FROM scoped a
LEFT JOIN scoped b
    ON b.sender = a.sender
    AND b.scope = a.scope
    AND b.name = a.name
    AND b.week = date_add(a.week, 7)
GROUP BY a.week, a.scope, a.name
ORDER BY a.week DESC, a.scope, users DESC, a.name
